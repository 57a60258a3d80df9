"""Bounds on a directory that many processes change: its exact usage, and LRU eviction when full.

The file ``usage`` holds one record (little-endian)::

    magic[8]  bytes:i64  files:i64  crc32:u32

A writer locks it, overwrites the magic, changes the directory, and writes the record again. If it
is killed in between, the magic is missing and the next process that takes the lock counts the
files. Where the record is absent or damaged, they are counted as well.

The modification time of an object is its last use, and the oldest objects go first. A writer that
finds no room evicts what it needs and a few more. Trimming in the background keeps the directory
below its bounds, so that writers seldom have to. Both look for the oldest objects without the lock,
one process at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator

from s3cache.errors import NoSpaceError, TransientError
from s3cache.stats import Usage
from s3cache.store import ObjectFiles, ObjectInfo
from s3cache.util.forks import call_in_child, close_unshared

__all__ = ["Bounds", "Ledger", "UsageFile"]

_RECORD = struct.Struct("<8sqqI")
_MAGIC = b"s3cuse2\n"
_CHANGING = b"changing"
LOCK_TIMEOUT_S = 4.0

# Trimming starts above the first fraction of a bound and ends at the second.
_HIGH_WATER = 0.95
_LOW_WATER = 0.90
# One process trims so often at most.
_TRIM_EVERY_S = 10.0
# A trim pauses after each object, so that others get the lock.
_TRIM_PAUSE_S = 0.0005
# A scan that differs from the ledger by this fraction of a bound shows that it is wrong.
_TOLERANCE = 0.05
# A writer evicts one in so many objects more than it needs, so that the next ones need no scan.
_SPARE_PART = 50
# A writer waits for another process's scan, so long at a time, and in all.
_SCAN_POLL_S = 0.005
_SCAN_WAIT_S = 1.0


class UsageFile:
    """The lock on a directory's objects, and how much they hold."""

    def __init__(self, files: ObjectFiles) -> None:
        self._files = files
        # Threads of one process wait here at no cost; the lock of the file has to be polled.
        self._mutex = threading.Lock()
        call_in_child(self._renew_mutex)

    def _renew_mutex(self) -> None:
        self._mutex = threading.Lock()  # a thread of the parent may have held it

    @contextlib.contextmanager
    def locked(self) -> Iterator[Ledger]:
        """Lock the directory's objects, and give what they hold.

        Raises:
            TransientError: another thread or process held the lock for :data:`LOCK_TIMEOUT_S`.
            OSError: the file cannot be opened or written.
        """
        mutex = self._mutex  # a child that is forked within the block has another one
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        if not mutex.acquire(timeout=LOCK_TIMEOUT_S):
            raise self._busy("another thread")
        try:
            fd = self._open_locked(deadline)
            try:
                yield Ledger(self._files, fd)
            finally:
                close_unshared(fd)
        finally:
            mutex.release()

    @contextlib.contextmanager
    def try_scan(self) -> Iterator[bool]:
        """Give whether this thread is the only one to look for old objects, for the block."""
        fd = self._open("usage.scan")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_alone = True
        except BlockingIOError:
            is_alone = False
        except OSError:  # no locks on this file system: several may
            is_alone = True
        try:
            yield is_alone
        finally:
            close_unshared(fd)

    def _open_locked(self, deadline: float) -> int:
        while True:
            fd = self._open("usage")
            try:
                self._lock(fd, deadline)
                if os.fstat(fd).st_nlink:
                    return fd
            except BaseException:
                close_unshared(fd)
                raise
            close_unshared(fd)  # removed while we waited: others use a new one

    def _open(self, name: str) -> int:
        flags = os.O_RDWR | os.O_CREAT
        try:
            return self._files.directory().open_private(name, flags)
        except FileNotFoundError:  # the root was removed: make it again
            self._files.ensure()
            return self._files.directory().open_private(name, flags)

    def _lock(self, fd: int, deadline: float) -> None:
        pause_s = 0.0001
        while True:
            try:
                return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise self._busy("another process") from None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.005)

    def _busy(self, holder: str) -> TransientError:
        path = os.path.join(self._files.root, "usage")
        problem = f"{holder} has held {path} for {LOCK_TIMEOUT_S:g} s"
        return TransientError(problem, op="lock", store=self._files.url)


class Ledger:
    """Bytes and files held; exact while the lock is held, as every change is made within it."""

    def __init__(self, files: ObjectFiles, fd: int) -> None:
        self._files = files
        self._fd = fd
        self._is_in_doubt = False
        record = os.pread(fd, _RECORD.size, 0)
        if len(record) == _RECORD.size:
            _, size, count, _ = _RECORD.unpack(record)
            self.usage = Usage(size, count)
            if record == self._record() and size >= 0 <= count:
                return
        self.count()

    def count(self) -> list[ObjectInfo]:
        """Correct the usage by looking at all objects; return them."""
        infos = list(self._files.walk())
        self.usage = _usage_of(infos)
        self._is_in_doubt = False
        self._store()
        return infos

    def size_of(self, name: str) -> int | None:
        """Return the size of object ``name``, or ``None`` if it is not there."""
        info = self._files.stat(name)
        return None if info is None else info.size

    @contextlib.contextmanager
    def changing(self, before: int | None, after: int | None) -> Iterator[None]:
        """Book that the block changes the size of an object; ``None`` is that of an absent one.

        Where the block fails, the next process that takes the lock counts.
        """
        os.pwrite(self._fd, _CHANGING, 0)
        try:
            yield
        except BaseException:
            self._is_in_doubt = True
            raise
        self.usage = Usage(
            self.usage.bytes + (after or 0) - (before or 0),
            self.usage.files + (after is not None) - (before is not None),
        )
        if not self._is_in_doubt:
            self._store()

    def _store(self) -> None:
        os.pwrite(self._fd, self._record(), 0)

    def _record(self) -> bytes:
        size, count = self.usage.bytes, self.usage.files
        return _RECORD.pack(_MAGIC, size, count, zlib.crc32(b"%d %d" % (size, count)))


class Bounds:
    """At most ``max_bytes`` and ``max_files`` of objects; the least recently used go first.

    Any number of threads and processes may have bounds on one directory.

    Args:
        pinned: gives the names of objects that must not go; called with the lock held.
    """

    def __init__(
        self,
        files: ObjectFiles,
        *,
        max_bytes: int,
        max_files: int,
        pinned: Callable[[], set[str]],
    ) -> None:
        self.max_bytes = max_bytes
        self.max_files = max_files
        self._files = files
        self._pinned = pinned
        self._usage_file = UsageFile(files)
        self.locked = self._usage_file.locked
        self._is_nearly_full = False
        self._next_trim = 0.0

    @contextlib.contextmanager
    def reserve(self, name: str, size: int) -> Iterator[tuple[Ledger, int | None]]:
        """Make room for object ``name``; give the ledger, locked, and the bytes it has now.

        Raises:
            NoSpaceError: it does not fit even if everything that may go is evicted.
        """
        objects: list[ObjectInfo] | None = None
        waits_until = time.monotonic() + _SCAN_WAIT_S
        while True:
            with self.locked() as ledger:
                before = ledger.size_of(name)
                growth = Usage(size - (before or 0), int(before is None))
                if objects is not None:
                    self._make_room(ledger, name, growth, objects)
                if self._fits(ledger.usage, growth):
                    self._is_nearly_full = self._is_above(ledger, _HIGH_WATER)
                    yield ledger, before
                    return
            with self._usage_file.try_scan() as is_alone:
                # The process that scans may be stopped.
                scans = is_alone or time.monotonic() > waits_until
                objects = self._oldest_first() if scans else None
            if objects is None:
                time.sleep(_SCAN_POLL_S)

    def is_trim_due(self) -> bool:
        """Return whether the directory was nearly full at the last write, now and then."""
        now = time.monotonic()
        is_due = self._is_nearly_full and now >= self._next_trim
        if is_due:
            self._next_trim = now + _TRIM_EVERY_S
        return is_due

    def trim(self) -> int:
        """Evict down to the low-water mark if above the high one; return how many objects.

        For a background thread. Of several processes, one does it.
        """
        with self.locked() as ledger:
            if not self._is_above(ledger, _HIGH_WATER):
                return 0
        removed = 0
        with self._usage_file.try_scan() as is_alone:
            if not is_alone:
                return 0
            objects = self._oldest_first()
            with self.locked() as ledger:
                candidates = self._evictable(ledger, objects)
            for candidate in candidates:
                with self.locked() as ledger:
                    if not self._is_above(ledger, _LOW_WATER):
                        break
                    removed += self._evict(ledger, candidate)
                time.sleep(_TRIM_PAUSE_S)
        return removed

    def _make_room(
        self, ledger: Ledger, name: str, growth: Usage, objects: list[ObjectInfo]
    ) -> None:
        """Evict the oldest of ``objects`` until object ``name`` fits, and a few more.

        Raises:
            NoSpaceError: it would not fit if all were evicted; none was.
        """
        candidates = [info for info in self._evictable(ledger, objects) if info.key != name]
        freed = _usage_of(candidates)
        left = Usage(ledger.usage.bytes - freed.bytes, ledger.usage.files - freed.files)
        if not self._fits(left, growth):
            if _usage_of(objects) == ledger.usage:
                raise self._no_space(ledger, name, growth.bytes)
            objects[:] = _by_age(ledger.count())  # others have changed them since
            return self._make_room(ledger, name, growth, objects)
        spare = min(len(candidates), self.max_files) // _SPARE_PART
        for candidate in candidates:
            if self._fits(ledger.usage, growth):
                if not spare:
                    break
                spare -= 1
            self._evict(ledger, candidate)
        return None

    def _evictable(self, ledger: Ledger, objects: list[ObjectInfo]) -> list[ObjectInfo]:
        """Return which of ``objects`` may be evicted; look again where files changed by hand.

        While the lock is held, no pending upload moves from one process to another. What became
        pending after ``objects`` was made has a later time than it says.
        """
        scanned = _usage_of(objects)
        off_bytes = abs(ledger.usage.bytes - scanned.bytes)
        off_files = abs(ledger.usage.files - scanned.files)
        if off_bytes > _TOLERANCE * self.max_bytes or off_files > _TOLERANCE * self.max_files:
            objects[:] = _by_age(ledger.count())
        pinned = self._pinned()
        return [info for info in objects if info.key not in pinned]

    def _evict(self, ledger: Ledger, candidate: ObjectInfo) -> bool:
        """Remove the object, unless it was used or replaced since it was looked at."""
        if self._files.stat(candidate.key) != candidate:
            return False
        with ledger.changing(candidate.size, None):
            self._files.delete(candidate.key)
        return True

    def _oldest_first(self) -> list[ObjectInfo]:
        return _by_age(self._files.walk())

    def _fits(self, usage: Usage, growth: Usage) -> bool:
        return (
            usage.bytes + growth.bytes <= self.max_bytes
            and usage.files + growth.files <= self.max_files
        )

    def _is_above(self, ledger: Ledger, fraction: float) -> bool:
        usage = ledger.usage
        return usage.bytes > fraction * self.max_bytes or usage.files > fraction * self.max_files

    def _no_space(self, ledger: Ledger, name: str, size: int) -> NoSpaceError:
        return NoSpaceError(
            f"{size} bytes more do not fit: {ledger.usage.bytes} of {self.max_bytes} bytes and "
            f"{ledger.usage.files} of {self.max_files} files are taken and may not be evicted",
            op="put",
            store=self._files.url,
            key=name,
        )


def _usage_of(objects: list[ObjectInfo]) -> Usage:
    return Usage(sum(info.size for info in objects), len(objects))


def _by_age(objects: Iterable[ObjectInfo]) -> list[ObjectInfo]:
    return sorted(objects, key=lambda info: info.modified)
