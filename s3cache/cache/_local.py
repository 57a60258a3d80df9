"""The local tier as the cache uses it: verified, and done without for a while when it fails."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Sequence

from s3cache import entries, frame
from s3cache.cache._problems import Problems
from s3cache.errors import ClosedError, CorruptError, NoSpaceError, S3CacheError
from s3cache.frame import Frame
from s3cache.stats import Counters
from s3cache.store import Buffer
from s3cache.tier import LocalTier, Usage
from s3cache.transfer import background

__all__ = ["Local", "verified"]

# A tier that failed is left alone for so long: somebody may empty its disk meanwhile.
_REST_S = 60.0
# Trim after this part of a bound has been written.
_TRIM_EVERY = 0.02


class Local:
    """Entries of one namespace in the local tier; with ``tier=None``, none."""

    def __init__(
        self, tier: LocalTier | None, namespace: str, problems: Problems, counters: Counters
    ) -> None:
        self._tier = tier
        self._namespace = namespace
        self._problems = problems
        self._counters = counters
        self._unread_until = 0.0
        self._unwritten_until = 0.0
        #: Why it could not be read or written the last time, if it could not.
        self.error: Exception | None = None
        self._mutex = threading.Lock()
        self._written_bytes = 0
        self._written_files = 0

    @property
    def readable(self) -> LocalTier | None:
        """The tier, unless reading it failed just now."""
        return self._tier if time.monotonic() >= self._unread_until else None

    @property
    def writable(self) -> LocalTier | None:
        """The tier, unless writing it failed just now."""
        return self._tier if time.monotonic() >= self._unwritten_until else None

    def load(self, name: str) -> Frame | None:
        """The verified entry at ``name``, or ``None``.

        Raises:
            CorruptError: the file is damaged; it was set aside.
        """
        tier = self.readable
        if tier is None:
            return None
        try:
            data = tier.get(self._namespace + name)
        except S3CacheError as exc:
            self.read_failed(exc)
            return None
        if data is None:
            return None
        try:
            return verified(name, data)
        except CorruptError:
            self._quarantine(tier, name)
            raise

    def set_aside(self, entry: Frame) -> None:
        """Put every copy of an entry that was loaded from here where nobody looks it up."""
        tier = self.readable
        header = entry.header
        names = entries.first_name(header.key), entries.variant_name(header.key, header.variant)
        for name in names:
            with contextlib.suppress(CorruptError):
                there = self.load(name)
                if tier is not None and there is not None and there.digest == entry.digest:
                    self._quarantine(tier, name)

    def _quarantine(self, tier: LocalTier, name: str) -> None:
        self._counters.set_aside("local")
        try:
            tier.quarantine(self._namespace + name)
        except S3CacheError as exc:
            self.write_failed(exc)

    def names(self, key: str) -> list[str]:
        """Names of all entries under ``key``, the last used first."""
        tier = self.readable
        if tier is None:
            return []
        prefix = self._namespace + entries.name_prefix(key)
        try:
            found = sorted(tier.objects(prefix), key=lambda info: info.modified, reverse=True)
        except S3CacheError as exc:
            self.read_failed(exc)
            return []
        return [info.key[len(self._namespace) :] for info in found]

    def holds(self, name: str) -> bool:
        """Whether there is something at ``name``; it is not looked at."""
        tier = self.readable
        try:
            return tier is not None and tier.holds(self._namespace + name)
        except S3CacheError as exc:
            self.read_failed(exc)
            return False

    def keep(self, objects: Sequence[tuple[str, Buffer]]) -> None:
        """Write what came from the remote, if the tier takes it."""
        tier = self.writable
        if tier is None or not objects:
            return
        try:
            failed = tier.put_all([(self._namespace + name, data) for name, data in objects])
        except S3CacheError as exc:
            self.write_failed(exc)
            return
        for name, data in objects:
            error = failed.get(self._namespace + name)
            if error is None:
                self.wrote(tier, memoryview(data).nbytes)
            else:
                self.write_failed(error)

    def usage(self) -> Usage | None:
        """Bytes and files held, by all namespaces; ``None`` without a tier."""
        tier = self.readable
        try:
            return None if tier is None else tier.usage()
        except S3CacheError as exc:
            self.read_failed(exc)
            return None

    def wrote(self, tier: LocalTier, size: int) -> None:
        """Have the tier trimmed in the background after every so many bytes and files."""
        self.error = None
        with self._mutex:
            self._written_bytes += size
            self._written_files += 1
            if (
                self._written_bytes < _TRIM_EVERY * tier.max_bytes
                and self._written_files < _TRIM_EVERY * tier.max_files
            ):
                return
            self._written_bytes = self._written_files = 0
        with contextlib.suppress(ClosedError):  # the interpreter is exiting
            background().submit(self._trim(tier))

    async def _trim(self, tier: LocalTier) -> None:
        try:
            await asyncio.to_thread(tier.trim)
        except Exception as exc:  # noqa: BLE001 - whatever it is, it can be tried again
            self._problems.warn("local", "the local tier cannot be trimmed", exc)

    def read_failed(self, error: S3CacheError) -> None:
        """Do without the tier for a while."""
        self.error = error
        self._unread_until = self._unwritten_until = time.monotonic() + _REST_S
        self._problems.met("local", "the local tier fails and is not used for now", error)

    def write_failed(self, error: S3CacheError) -> None:
        """Write nothing for a while; what is there can still be read."""
        self.error = error
        if isinstance(error, NoSpaceError) and error.__cause__ is None:
            # Within its bounds, not for want of disk: the next entry may fit.
            self._problems.met("bound", "the local tier is too small for this entry", error)
            return
        self._unwritten_until = time.monotonic() + _REST_S
        self._problems.met("local", "the local tier cannot be written and is left as it is", error)


def verified(name: str, data: Buffer) -> Frame:
    """The entry in ``data``, every section checked, and that it belongs at ``name``.

    Raises:
        CorruptError: it is damaged, or of another key or variant.
    """
    entry = frame.decode(data)
    entries.check_place(name, entry.header)
    entry.verify()
    return entry
