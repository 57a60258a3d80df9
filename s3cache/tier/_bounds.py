"""Bounds on a directory that many processes change: its exact usage, and LRU eviction when full.

The file ``usage`` holds one record (little-endian), ``exact:? bytes:i64 files:i64``. A writer locks
the file, marks the record as inexact, changes the directory, and writes the record again. A process
that takes the lock and sees no exact record, as after a kill, counts the files.

The modification time of an object is its last use, and the oldest objects go first. Looking for
them takes no lock, and one process at a time does it; the others can write meanwhile if there is
room.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator

from s3cache.errors import NoSpaceError, TransientError
from s3cache.stats import Usage
from s3cache.store import Directory, ObjectFiles, ObjectInfo
from s3cache.util.forks import call_in_child, close_unshared

__all__ = ["Bounds", "Ledger", "UsageFile", "try_lock"]

_RECORD = struct.Struct("<?qq")
_NOTHING = Usage(0, 0)
_INEXACT = b"\0"
LOCK_TIMEOUT_S = 4.0

# A writer that finds no room evicts down to this fraction of a bound: the next ones find some.
_LOW_WATER = 0.90
# Objects evicted before others get the lock.
_BATCH = 64
# A scan that differs from the ledger by this fraction of a bound shows that it is wrong.
_TOLERANCE = 0.05
# A writer waits for another process's scan, so long at a time, and in all.
_SCAN_POLL_S = 0.005
_SCAN_WAIT_S = 1.0


def try_lock(directory: Directory, name: str) -> int | None:
    """Open and lock a private file, made if missing; return None if another process has the lock.

    :func:`~s3cache.util.forks.close_unshared` unlocks it.
    """
    fd = directory.open_private(name, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_nlink:
            return fd
    except BlockingIOError:
        pass
    except BaseException:
        close_unshared(fd)
        raise
    close_unshared(fd)  # locked by another process, or removed meanwhile: others use a new one
    return None


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
        """
        mutex = self._mutex  # a child that is forked within the block has another one
        deadline, pause_s = time.monotonic() + LOCK_TIMEOUT_S, 0.0001
        if not mutex.acquire(timeout=LOCK_TIMEOUT_S):
            raise self._busy("another thread")
        try:
            while (fd := self.try_lock("usage")) is None:
                if time.monotonic() > deadline:
                    raise self._busy("another process")
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.005)
            try:
                yield Ledger(self._files, fd)
            finally:
                close_unshared(fd)
        finally:
            mutex.release()

    def try_lock(self, name: str) -> int | None:
        """Lock a file of the root, see :func:`try_lock`."""
        try:
            return try_lock(self._files.directory(), name)
        except FileNotFoundError:  # the root was removed: make it again
            self._files.ensure()
            return try_lock(self._files.directory(), name)

    def _busy(self, holder: str) -> TransientError:
        path = os.path.join(self._files.root, "usage")
        problem = f"{holder} has held {path} for {LOCK_TIMEOUT_S:g} s"
        return TransientError(problem, op="lock", store=self._files.url)


class Ledger:
    """Bytes and files held; exact while the lock is held, as every change is made within it."""

    def __init__(self, files: ObjectFiles, fd: int) -> None:
        self._files = files
        self._fd = fd
        record = os.pread(fd, _RECORD.size + 1, 0)
        if len(record) == _RECORD.size:
            is_exact, *usage = _RECORD.unpack(record)
            if is_exact and min(usage) >= 0:
                self.usage = Usage(*usage)
                return
        self.count()

    def count(self) -> list[ObjectInfo]:
        """Correct the usage by looking at all objects; return them, the oldest first."""
        objects = _oldest_first(self._files)
        self.usage = _usage_of(objects)
        os.ftruncate(self._fd, _RECORD.size)
        self._store()
        return objects

    def size_of(self, name: str) -> int | None:
        """Return the size of object ``name``, or ``None`` if it is not there."""
        info = self._files.stat(name)
        return None if info is None else info.size

    @contextlib.contextmanager
    def changing(self, before: int | None, after: int | None) -> Iterator[None]:
        """Book that the block changes the size of an object; ``None`` is that of an absent one.

        Where the block fails, the next process that takes the lock counts.
        """
        os.pwrite(self._fd, _INEXACT, 0)
        yield
        self.usage = Usage(
            self.usage.bytes + (after or 0) - (before or 0),
            self.usage.files + (after is not None) - (before is not None),
        )
        self._store()

    def _store(self) -> None:
        os.pwrite(self._fd, _RECORD.pack(True, self.usage.bytes, self.usage.files), 0)


class Bounds:
    """At most ``max_bytes`` and ``max_files`` of objects; the least recently used go first.

    ``pinned`` gives the names of objects that must not go; it is called with the lock held.
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

    @contextlib.contextmanager
    def reserve(self, name: str, size: int) -> Iterator[tuple[Ledger, int | None]]:
        """Make room for object ``name``; give the ledger, locked, and the bytes it has now.

        Raises:
            NoSpaceError: it does not fit even if everything that may go is evicted.
        """
        scan_at = time.monotonic() + _SCAN_WAIT_S  # the process that scans may be stopped
        while True:
            with self.locked() as ledger:
                before = ledger.size_of(name)
                growth = Usage(size - (before or 0), int(before is None))
                if self._fits(ledger.usage, growth):
                    yield ledger, before
                    return
            scan = self._usage_file.try_lock("usage.scan")
            if scan is None and time.monotonic() < scan_at:
                time.sleep(_SCAN_POLL_S)
                continue
            try:
                self._evict(growth, name)
            finally:
                if scan is not None:
                    close_unshared(scan)

    def _evict(self, growth: Usage, name: str) -> None:
        """Evict the oldest objects but ``name``, so that ``growth`` fits, and some more.

        Raises:
            NoSpaceError: it would not fit if all were evicted; none was.
        """
        objects = _oldest_first(self._files)
        with self.locked() as ledger:
            # While the lock is held, no pending upload moves from one process to another. What
            # becomes pending from now on has a later time than the scan says.
            pinned = {*self._pinned(), name}
            if self._is_off(ledger, objects) or not self._would_fit(
                ledger, objects, pinned, growth
            ):
                objects = ledger.count()
                if not self._would_fit(ledger, objects, pinned, growth):
                    raise self._no_space(ledger, name, growth.bytes)
        left = iter([info for info in objects if info.key not in pinned])
        while True:
            with self.locked() as ledger:
                for _ in range(_BATCH):
                    is_enough = self._fits(ledger.usage, part=_LOW_WATER)
                    if is_enough and self._fits(ledger.usage, growth):
                        return
                    if (candidate := next(left, None)) is None:
                        return
                    if self._files.stat(candidate.key) == candidate:  # not used or replaced since
                        with ledger.changing(candidate.size, None):
                            self._files.delete(candidate.key)

    def _is_off(self, ledger: Ledger, objects: list[ObjectInfo]) -> bool:
        """Return whether files were changed by hand: others change a few during a scan."""
        scanned = _usage_of(objects)
        return (
            abs(ledger.usage.bytes - scanned.bytes) > _TOLERANCE * self.max_bytes
            or abs(ledger.usage.files - scanned.files) > _TOLERANCE * self.max_files
        )

    def _would_fit(
        self, ledger: Ledger, objects: list[ObjectInfo], pinned: set[str], growth: Usage
    ) -> bool:
        """Return whether ``growth`` fits once all objects that may go are evicted."""
        freed = _usage_of([info for info in objects if info.key not in pinned])
        left = Usage(ledger.usage.bytes - freed.bytes, ledger.usage.files - freed.files)
        return self._fits(left, growth)

    def _fits(self, usage: Usage, growth: Usage = _NOTHING, part: float = 1.0) -> bool:
        return (
            usage.bytes + growth.bytes <= part * self.max_bytes
            and usage.files + growth.files <= part * self.max_files
        )

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


def _oldest_first(files: ObjectFiles) -> list[ObjectInfo]:
    return sorted(files.walk(), key=lambda info: info.modified)
