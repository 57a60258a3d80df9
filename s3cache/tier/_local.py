"""The local tier as a cache uses it: a disk that may be absent or fail; its errors end here."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from s3cache import entries
from s3cache.errors import (
    ClosedError,
    ConfigError,
    CorruptError,
    NoSpaceError,
    S3CacheError,
    StoreError,
    UntrustedError,
)
from s3cache.frame import Frame, TrustCheck
from s3cache.stats import Counters, Usage
from s3cache.store import ObjectInfo
from s3cache.tier._disk import DiskTier, SearchResult
from s3cache.tier._loop import background
from s3cache.util.logs import Problems

__all__ = ["LocalTier"]

_T = TypeVar("_T")

# A disk that failed is not used for so long: meanwhile there may be room again.
_REST_S = 60.0


class LocalTier:
    """A disk tier that is not used for a minute after it failed.

    While it is not used, or there is none, it looks empty and full. What fails is not raised,
    unless the cache is strict.

    Args:
        check_trust: checks signatures.

    Attributes:
        disk: the tier itself, which raises what fails; ``None`` if there is none.
        error: why it could not be read or written the last time, if it could not.
    """

    def __init__(
        self,
        disk: DiskTier | None,
        counters: Counters,
        problems: Problems,
        check_trust: TrustCheck | None = None,
    ) -> None:
        self.disk = disk
        self._check_trust = check_trust
        self._counters = counters
        self._problems = problems
        self._unread_until = 0.0
        self._unwritten_until = 0.0
        self.error: Exception | None = None

    @property
    def read_error(self) -> Exception | None:
        """Why nothing is read for now, if reading failed just now."""
        return self.error if time.monotonic() < self._unread_until else None

    @property
    def is_writable(self) -> bool:
        """Whether there is a disk, and writing it did not fail just now."""
        return self.disk is not None and time.monotonic() >= self._unwritten_until

    # -- reading

    def load(self, name: str) -> Frame | None:
        """Return the verified entry at ``name``, or ``None``.

        Raises:
            CorruptError: the file is damaged; it was set aside.
        """
        data = self._read(lambda disk: disk.get(name), None)
        return None if data is None else self.verify(name, data)

    def verify(self, name: str, data: bytes) -> Frame:
        """Return the entry that was read from ``name``.

        Raises:
            CorruptError: the file is damaged; it was set aside.
            UntrustedError: it is not trusted; it stays, as others may trust its signer.
        """
        try:
            return entries.verify(name, data, admit=self._check_trust)
        except CorruptError:
            self._quarantine(name)
            raise

    def search(self, key: str, names: Sequence[str]) -> SearchResult:
        """Find the first of ``names``, or list what there is of ``key``, the last used first.

        Not verified: see :meth:`verify`.
        """
        prefix = entries.name_prefix(key)
        found = self._read(lambda disk: disk.search(names, prefix), SearchResult())
        return replace(found, others=tuple(_last_used_first(found.others)))

    def names(self, key: str) -> list[str]:
        """List the names of all entries under ``key``, the last used first."""
        prefix = entries.name_prefix(key)
        present: list[ObjectInfo] = self._read(lambda disk: disk.objects(prefix), [])
        return [info.key for info in _last_used_first(present)]

    def holds(self, name: str) -> bool:
        """Return whether there is something at ``name``, whatever it is."""
        return self._read(lambda disk: disk.holds(name), False)

    def usage(self) -> Usage | None:
        """Return bytes and files held, by all namespaces; ``None`` without a disk."""
        return self._read(lambda disk: disk.usage(), None)

    def _read(self, read: Callable[[DiskTier], _T], otherwise: _T) -> _T:
        """Return what ``read`` gives, or ``otherwise`` where there is no disk or it fails."""
        if self.disk is None or time.monotonic() < self._unread_until:
            return otherwise
        try:
            return read(self.disk)
        except CorruptError:
            raise
        except S3CacheError as exc:
            self.error = exc
            self._unread_until = self._unwritten_until = time.monotonic() + _REST_S
            self._problems.met("local", "the local tier fails and is not used for now", exc)
            return otherwise

    # -- writing

    def write(self, write: Callable[[DiskTier], object]) -> bool:
        """Let ``write`` change the disk; return whether there is one, and it did not fail.

        The tier is trimmed in the background from time to time.
        """
        disk = self.disk
        if disk is None or not self.is_writable:
            return False
        try:
            write(disk)
        except (StoreError, ConfigError) as exc:
            self._write_failed(exc)
            return False
        self.error = None
        if disk.is_trim_due():
            with contextlib.suppress(ClosedError):  # the interpreter is exiting
                background().submit(asyncio.to_thread(self._trim, disk))
        return True

    def remove(self, name: str) -> bool:
        """Remove the object, and our record of it; return whether it was there.

        Raises:
            StoreError: the disk fails.
        """
        if self.disk is None or not self.is_writable or not self.disk.holds(name):
            return False
        self.disk.uploaded(name)
        self.disk.delete(name)
        return True

    def remove_all(self, prefix: str, *, but: Callable[[str], bool] | None = None) -> list[str]:
        """Remove all objects with ``prefix`` and our records of them; return their names.

        Args:
            but: whether an object of that name stays.

        Raises:
            StoreError: the disk fails.
        """
        if self.disk is None:
            return []
        removed = []
        for info in self.disk.objects(prefix):
            if but is None or not but(info.key):
                self.disk.uploaded(info.key)
                self.disk.delete(info.key)
                removed.append(info.key)
        return removed

    def set_aside(self, entry: Frame) -> None:
        """Quarantine every copy of an entry that was loaded from here."""
        for name in entries.names_of(entry.header):
            with contextlib.suppress(CorruptError, UntrustedError):
                there = self.load(name)
                if there is not None and there.digest == entry.digest:
                    self._quarantine(name)

    def _quarantine(self, name: str) -> None:
        if self.disk is None:
            return
        self._counters.set_aside("local")
        try:
            self.disk.quarantine(name)
        except S3CacheError as exc:
            self._write_failed(exc)

    def _write_failed(self, error: S3CacheError) -> None:
        """Write nothing for a while; what is there can still be read."""
        self.error = error
        if isinstance(error, NoSpaceError) and error.__cause__ is None:
            # It is the bounds that leave no room, not the disk: the next entry may fit.
            self._problems.met("bound", "the local tier is too small for this entry", error)
            return
        self._unwritten_until = time.monotonic() + _REST_S
        self._problems.met("local", "the local tier cannot be written and is left as it is", error)

    def _trim(self, disk: DiskTier) -> None:
        try:
            disk.trim()
        except Exception as exc:  # noqa: BLE001 - whatever it is, it can be tried again
            self._problems.warn("local", "the local tier cannot be trimmed", exc)

    def close(self, timeout_s: float) -> None:
        """Leave what is not uploaded to other processes."""
        if self.disk is not None:
            self.disk.close(timeout_s)


def _last_used_first(present: Sequence[ObjectInfo]) -> list[ObjectInfo]:
    return sorted(present, key=lambda info: info.modified, reverse=True)
