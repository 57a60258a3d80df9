"""The local tier: a disk that is left alone for a while after a failure."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from s3cache import entries, frame
from s3cache.entries import Replaceable
from s3cache.errors import (
    ConfigError,
    CorruptError,
    NoSpaceError,
    S3CacheError,
    StoreError,
    UntrustedError,
)
from s3cache.frame import Frame, TrustCheck
from s3cache.settings import Settings
from s3cache.stats import Counters
from s3cache.store import Buffer, ObjectInfo
from s3cache.tier._disk import DiskTier, namespace_of
from s3cache.util.logs import Problems

_T = TypeVar("_T")
_U = TypeVar("_U")

# The prefix of the marks of entries that raised at their first call, by digest.
_ASIDE = "aside/"
# How long a disk is not used after a failure: it may have room again later.
_REST_S = 60.0


class LocalTier:
    """A disk tier that is not used for a minute after a failure.

    While it is not used, or without a disk, it looks empty and full. Errors are raised only if the
    cache is strict.

    Attributes:
        disk: the tier itself, which raises errors; ``None`` if there is none.
        check_trust: checks signatures, if there is a policy.
        error: the error of the last read or write, if it failed.
    """

    def __init__(
        self,
        disk: DiskTier | None,
        counters: Counters,
        problems: Problems,
        replaceable: Replaceable,
        check_trust: TrustCheck | None = None,
    ) -> None:
        self.disk = disk
        self.check_trust = check_trust
        self.error: Exception | None = None
        self._counters = counters
        self._problems = problems
        self._replaceable = replaceable
        self._unread_until = self._unwritten_until = 0.0
        self._aside: set[str] | None = None  # digests of entries that are not used, once read

    @property
    def read_error(self) -> Exception | None:
        """The recent error because of which nothing is read for now, if any."""
        return self.error if time.monotonic() < self._unread_until else None

    @property
    def is_writable(self) -> bool:
        """Whether there is a disk, and no recent write failed."""
        return self.disk is not None and time.monotonic() >= self._unwritten_until

    def search(
        self, key: str, names: Sequence[str]
    ) -> tuple[str, bytes, Frame | None] | list[ObjectInfo]:
        """Return the first of ``names`` that exists, its bytes and its entry, if it is sound.

        Without one, list the names under ``key``.
        """
        return self.read(lambda disk: disk.search(names, entries.name_prefix(key), self._sound), [])

    def _sound(self, name: str, data: bytes) -> Frame | None:
        with contextlib.suppress(CorruptError, UntrustedError):
            return entries.verify(name, data, admit=self.check_trust)
        return None

    def load(self, name: str) -> Frame | None:
        """Return the entry ``name``, or ``None``; see :meth:`verify`."""
        data = self.read(lambda disk: disk.get(name), None)
        return None if data is None else self.verify(name, data)

    def verify(self, name: str, data: bytes) -> Frame:
        """Return the entry that was read from ``name``; if it is damaged, remove it and raise.

        An entry that is not trusted stays, because others may trust its signer.
        """
        try:
            return entries.verify(name, data, admit=self.check_trust)
        except CorruptError:
            self._remove(name, data)
            raise

    def land(self, name: str, data: Buffer) -> Frame:
        """Verify a download, and keep it if there is room.

        If it is damaged, the next entry that is saved here replaces it in the remote.
        """
        try:
            entry = entries.verify(name, data, admit=self.check_trust)
        except CorruptError:
            self._counters.add("remote", set_aside=1)
            with contextlib.suppress(CorruptError):  # an upload detects a damaged header itself
                self._replaceable.add(frame.decode_head(data).digest)
            raise
        self.write(lambda disk: disk.put(name, data))
        return entry

    def present(self, names: list[str]) -> list[str]:
        """Return the ``names`` that exist, without verifying them."""
        return self.read(lambda disk: disk.deadline.call(lambda: [*filter(disk.head, names)]), [])

    def read(self, read: Callable[[DiskTier], _T], otherwise: _U) -> _T | _U:
        """Return the result of ``read``; without a disk that works, return ``otherwise``."""
        if self.disk is None or time.monotonic() < self._unread_until:
            return otherwise
        try:
            return read(self.disk)
        except S3CacheError as exc:
            self.error = exc
            self._unread_until = self._unwritten_until = time.monotonic() + _REST_S
            self._problems.met("local", "the local tier failed and is not used for now", exc)
            return otherwise

    def write(self, write: Callable[[DiskTier], object]) -> bool:
        """Let ``write`` change the disk; return whether there is a disk and it worked."""
        if self.disk is None or not self.is_writable:
            return False
        try:
            write(self.disk)
        except (StoreError, ConfigError) as exc:
            self.error = exc
            if isinstance(exc, NoSpaceError) and exc.__cause__ is None:
                # The bounds leave no room, but the disk works: the next entry may fit.
                self._problems.met("bound", "the local tier is too small for this entry", exc)
                return False
            self._unwritten_until = time.monotonic() + _REST_S
            self._problems.met("local", "the local tier cannot be written for now", exc)
            return False
        self.error = None
        return True

    def set_aside(self, entry: Frame, error: Exception) -> None:
        """Treat a sound but unusable entry as damaged: the next save replaces it."""
        self._problems.warn("entry", "an entry cannot be used and is set aside", error)
        self._drop(entry)

    def mark(self, entry: Frame, why: str) -> None:
        """Set an entry aside for every process of this machine, also if it is fetched again."""
        digest = entry.digest.hex()
        self._marks().add(digest)
        self._drop(entry)
        self.write(lambda disk: disk.put(_ASIDE + digest, why.encode()))

    def is_marked(self, entry: Frame) -> bool:
        """Return whether an entry was marked; if so, the next save replaces it."""
        is_marked = entry.digest.hex() in self._marks()
        if is_marked:
            self._replaceable.add(entry.digest)
        return is_marked

    def _marks(self) -> set[str]:
        if self._aside is None:
            marks = self.read(lambda disk: disk.objects(_ASIDE), [])
            self._aside = {info.key.removeprefix(_ASIDE) for info in marks}
        return self._aside

    def _drop(self, entry: Frame) -> None:
        self._replaceable.add(entry.digest)
        self.discard(entry)

    def discard(self, entry: Frame) -> None:
        """Remove an entry from the disk."""
        for name in entries.names_of(entry.header):
            with contextlib.suppress(CorruptError, UntrustedError):
                there = self.load(name)
                if there is not None and there.digest == entry.digest:
                    self._remove(name, there.data)

    def _remove(self, name: str, data: Buffer) -> None:
        self._counters.add("local", set_aside=1)
        self.write(lambda disk: disk.delete(name, data))


def open_disk(settings: Settings, identity: str) -> DiskTier | None:
    """Open the local tier in the first usable directory; None if it is off or none is usable."""
    bounds = {"max_bytes": settings.local_max_bytes, "max_files": settings.local_max_files}
    problem, where = None, "there is no local tier"
    disk: DiskTier | None = None
    for place in settings.local_dirs if settings.local and settings.mode != "off" else ():
        try:
            disk = DiskTier(place, namespace=namespace_of(identity), remote=identity, **bounds)
        except (ConfigError, StoreError) as exc:
            # If another user owns the default directory, the program is not to blame.
            named = not settings.has_default_local_dir
            if settings.strict or (named and isinstance(exc, ConfigError)):
                raise
            problem = problem or exc
        else:
            where = f"the local tier goes to {place}"
            break
    if problem is not None:
        Problems(strict=False).warn("local", where, problem)
    return disk
