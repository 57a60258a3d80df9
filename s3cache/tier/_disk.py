"""The disk tier: entries on this machine, within bounds, and what is to be uploaded of them.

Beside ``objects/`` and ``staging/`` (see :class:`~s3cache.store.ObjectFiles`), its root holds::

    usage, usage.scan   how much is in objects/; locks of changes, and of looking for old objects
    pending/<owner>/    what is not uploaded yet           (s3cache.tier._pending)
    quarantine/         the last few files found corrupt
    CACHEDIR.TAG        tells backup programs to leave all this out

The file ``usage`` holds one record (little-endian), ``exact:? bytes:i64 files:i64``. A writer locks
the file, marks the record as inexact, changes the directory, and writes the record again. A process
that takes the lock and sees no exact record, as after a kill, counts the files.

The modification time of an object is its last use, and the oldest go first. One process at a time
looks for them, without the lock: the others can write meanwhile if there is room.
"""

from __future__ import annotations

import contextlib
import functools
import os
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Concatenate, ParamSpec, TypeVar
from urllib.parse import quote

from s3cache.errors import ConfigError, NoSpaceError, ReadOnlyError, StoreError, TransientError
from s3cache.stats import Usage
from s3cache.store import Buffer, ObjectFiles, ObjectInfo, mark_used, os_errors
from s3cache.tier._pending import Pending
from s3cache.util.threads import DeadlineExecutor, call_in_child, close_unshared

__all__ = ["DiskTier", "Ledger"]

_P = ParamSpec("_P")
_T = TypeVar("_T")

_QUARANTINED_FILES = 8
# https://bford.info/cachedir/
_CACHEDIR_TAG = b"Signature: 8a477f597d28d172789f06886806bc55\n# Made by s3cache.\n"
# Entries that differ do so in the digests and signatures that they begin with.
_BEGINNING_BYTES = 4096

# A slow disk does not hang: a call may take a second more for so many bytes.
_BYTES_A_SECOND = 32 << 20
# A call that looks at all objects, for which no lookup or save waits, may take this much more.
_SCAN_S = 120.0

LOCK_TIMEOUT_S = 4.0
_RECORD, _INEXACT = struct.Struct("<?qq"), b"\0"
# A writer that finds no room evicts down to this fraction of a bound: the next ones find some.
_LOW_WATER = 0.90
# Objects evicted before others get the lock.
_BATCH = 64
# A scan that differs from the record by this fraction of a bound shows that it is wrong.
_TOLERANCE = 0.05
# A writer waits for another process's scan, so long at a time, and in all.
_SCAN_POLL_S, _SCAN_WAIT_S = 0.005, 1.0


class Ledger:
    """The lock on a directory's objects, and how much they hold: exact while the lock is held.

    Every change is made within the lock, and only there may anything but :meth:`locked` be used.
    """

    def __init__(self, files: ObjectFiles) -> None:
        self._files = files
        self._fd = -1
        self.usage = Usage(0, 0)
        self._renew_mutex()
        call_in_child(self._renew_mutex)  # a thread of the parent may have held it

    def _renew_mutex(self) -> None:
        # Threads of one process wait here at no cost; the lock of the file has to be polled.
        self._mutex = threading.Lock()

    @contextlib.contextmanager
    def locked(self) -> Iterator[Ledger]:
        """Lock the directory's objects, and read what they hold; TransientError if it is busy."""
        mutex = self._mutex  # a child that is forked within the block has another one
        deadline, pause_s = time.monotonic() + LOCK_TIMEOUT_S, 0.0001
        if not mutex.acquire(timeout=LOCK_TIMEOUT_S):
            raise self._busy("another thread")
        try:
            while (fd := self._files.directory(make=True).try_lock("usage")) is None:
                if time.monotonic() > deadline:
                    raise self._busy("another process")
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.005)
            try:
                self._fd = fd
                self._read()
                yield self
            finally:
                close_unshared(fd)
        finally:
            mutex.release()

    def _busy(self, holder: str) -> TransientError:
        path = os.path.join(self._files.root, "usage")
        problem = f"{holder} has held {path} for {LOCK_TIMEOUT_S:g} s"
        return TransientError(problem, op="lock", store=self._files.url)

    def _read(self) -> None:
        record = os.pread(self._fd, _RECORD.size + 1, 0)
        is_exact, *usage = _RECORD.unpack(record) if len(record) == _RECORD.size else (False, 0, 0)
        if is_exact and min(usage) >= 0:
            self.usage = Usage(*usage)
        else:
            self.count()

    def count(self) -> list[ObjectInfo]:
        """Correct the usage by looking at all objects; return them, the oldest first."""
        objects = _oldest_first(self._files)
        self.usage = _usage_of(objects)
        os.ftruncate(self._fd, _RECORD.size)
        self._write()
        return objects

    def size_of(self, key: str) -> int | None:
        """Return the size of an object, or ``None`` if it is not there."""
        info = self._files.stat(key)
        return None if info is None else info.size

    @contextlib.contextmanager
    def changing(self, before: int | None, after: int | None) -> Iterator[None]:
        """Book that the block changes the size of an object; ``None`` is that of an absent one.

        Where the block fails, the next process that takes the lock counts.
        """
        os.pwrite(self._fd, _INEXACT, 0)
        yield
        growth = (after or 0) - (before or 0), (after is not None) - (before is not None)
        self.usage += Usage(*growth)
        self._write()

    def _write(self) -> None:
        os.pwrite(self._fd, _RECORD.pack(True, self.usage.bytes, self.usage.files), 0)


def _in_time(
    method: Callable[Concatenate[DiskTier, _P], _T],
) -> Callable[Concatenate[DiskTier, _P], _T]:
    """Have a method end within the deadline, whatever the disk does, and raise ``StoreError``."""

    @functools.wraps(method)
    def limited(tier: DiskTier, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        name = args[0] if args and isinstance(args[0], str) else ""

        def call() -> _T:
            with os_errors(method.__name__, tier.url, name):
                return method(tier, *args, **kwargs)

        return tier.deadline.call(call)

    return limited


class DiskTier:
    """Objects on the local disk, at most ``max_bytes`` and ``max_files`` of them. Synchronous.

    Any number of threads and processes of one machine may use the same root at once. The bounds
    hold for the objects; each writer may have one more in staging. What is pending is never
    evicted. Every method may raise :class:`~s3cache.errors.StoreError`, and ends within a few
    seconds, also where the disk hangs: what was begun goes on, and may end later.

    Args:
        namespace: keeps this tier's names apart from those of others in the same root, which share
            its bounds: objects of different places need not be equally trusted.
        note: kept in each record made here, for the process that uploads the object.

    Raises:
        ConfigError: the root is not a private directory of this user.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        max_bytes: int,
        max_files: int,
        namespace: str = "",
        note: bytes = b"",
    ) -> None:
        self._namespace = f"{namespace}/" if namespace else ""
        self._max_bytes, self._max_files = max_bytes, max_files
        self.deadline = DeadlineExecutor.of(os.path.abspath(os.fspath(root)))
        try:
            self.deadline.call(lambda: self._open(root, note))
        except BaseException:
            self.deadline.release()
            raise

    def _open(self, root: str | os.PathLike[str], note: bytes) -> None:
        self._files = ObjectFiles(root)
        self.root, self.url = self._files.root, self._files.url
        self._pending = Pending(lambda make: self._files.directory("pending", make=make), note)
        self._ledger = Ledger(self._files)
        self._locked = self._ledger.locked
        with (
            contextlib.suppress(ReadOnlyError),
            os_errors("open", self.url),
            contextlib.suppress(FileExistsError),
        ):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            fd = os.open("CACHEDIR.TAG", flags, 0o600, dir_fd=self._files.directory().fd)
            with os.fdopen(fd, "wb") as file:
                file.write(_CACHEDIR_TAG)
        self.usage()  # the first process counts; fails now if that cannot be written

    @_in_time
    def usage(self) -> Usage:
        """Return bytes and files held, by all namespaces, exact at the moment of the call."""
        try:
            with os_errors("usage", self.url), self._locked() as ledger:
                return ledger.usage
        except ReadOnlyError:  # no process changes it, or could write how much there is
            return _usage_of([*self._files.walk()])

    # -- reading

    @_in_time
    def search(self, names: Iterable[str], prefix: str) -> tuple[str, bytes] | list[ObjectInfo]:
        """Find the first of ``names``, marked as used, or list what there is with ``prefix``.

        One call, as each call is made by another thread. Nothing is verified.
        """
        for name in names:
            data = self._files.read(self._namespace + name, is_use=True)
            if data is not None:
                return name, data
        return self.objects(prefix)

    @_in_time
    def get(self, name: str) -> bytes | None:
        """Return the object's bytes, or ``None``; mark it as used just now."""
        return self._files.read(self._namespace + name, is_use=True)

    @_in_time
    def peek(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        """Return the object's bytes, or ``length`` of them, or ``None``; this is no use of it."""
        return self._files.read(self._namespace + name, start, length)

    @_in_time
    def head(self, name: str) -> ObjectInfo | None:
        """Return size and time of last use of the object, or ``None``; this is no use of it."""
        info = self._files.stat(self._namespace + name)
        return None if info is None else ObjectInfo(name, info.size, info.modified)

    def holds(self, name: str) -> bool:
        """Return whether the object is there; this is no use of it."""
        return self.head(name) is not None

    def objects(self, prefix: str = "") -> list[ObjectInfo]:
        """List all objects with ``prefix``, the last used first; ``modified`` is when."""
        start = len(self._namespace)

        def walk() -> list[ObjectInfo]:
            return [
                ObjectInfo(info.key[start:], info.size, info.modified)
                for info in self._files.walk(self._namespace + prefix)
            ]

        present = self.deadline.call(walk, more_s=0.0 if prefix else _SCAN_S)
        return sorted(present, key=lambda info: info.modified, reverse=True)

    # -- writing

    def put(self, name: str, data: Buffer) -> None:
        """Write or replace an object, evicting the least recently used to make room.

        It survives this process but perhaps not a power failure, after which it is had again.

        Raises:
            NoSpaceError: it is larger than the tier, or what is there may not be evicted.
        """
        self._put(name, data, pending=False)

    def put_pending(self, name: str, data: Buffer) -> None:
        """Put an object that is to be uploaded, and have that on record until :meth:`uploaded`.

        When this returns, the bytes have reached the disk. If the process ends before it uploads
        them, exactly one other takes that over with :meth:`adopt`. A power failure may take object
        and record, but never leaves a part. Where this fails, an earlier record of the name stays.
        """
        self._put(name, data, pending=True)

    def _put(self, name: str, data: Buffer, *, pending: bool) -> None:
        key, size = self._namespace + name, memoryview(data).nbytes
        if size > self._max_bytes:
            problem = f"{size} bytes are more than the {self._max_bytes} allowed"
            raise NoSpaceError(problem, op="put", store=self.url, key=key)
        work = functools.partial(self._write, key, data, size, pending=pending)
        self.deadline.call(work, more_s=size / _BYTES_A_SECOND)

    def _write(self, key: str, data: Buffer, size: int, *, pending: bool) -> None:
        with (
            self._files.staged(key, data, durable=pending) as staged,
            self._reserved(key, size) as (ledger, before),
        ):
            # First: an uploader forgets a pending upload without an object, but an object that is
            # not pending would never be uploaded.
            is_new = pending and self._pending.add(key)
            try:
                with ledger.changing(before, size):
                    mark_used(staged.fd)
                    self._files.place(staged, key)
            except BaseException:
                if is_new:
                    self._pending.remove(key)
                raise

    @contextlib.contextmanager
    def _reserved(self, key: str, size: int) -> Iterator[tuple[Ledger, int | None]]:
        """Make room for an object; give the ledger, locked, and the bytes that it has now."""
        scan_at = time.monotonic() + _SCAN_WAIT_S  # the process that scans may be stopped
        while True:
            with self._locked() as ledger:
                before = ledger.size_of(key)
                growth = Usage(size - (before or 0), int(before is None))
                if self._fits(ledger.usage + growth):
                    yield ledger, before
                    return
            scan = self._files.directory(make=True).try_lock("usage.scan")
            if scan is None and time.monotonic() < scan_at:
                time.sleep(_SCAN_POLL_S)
                continue
            try:
                self._evict(growth, key)
            finally:
                if scan is not None:
                    close_unshared(scan)

    def _evict(self, growth: Usage, key: str) -> None:
        """Evict the oldest objects but ``key``, so that ``growth`` fits, and some more.

        Where it would not fit if all were evicted, none is, and NoSpaceError is raised.
        """
        objects = _oldest_first(self._files)
        with self._locked() as ledger:
            # While the lock is held, no pending upload moves from one process to another. What
            # becomes pending from now on has a later time than the scan says.
            pinned = {*self._pending.all_pending(), key}
            # Others change a few files during a scan; where it is more, some were changed by hand.
            off = ledger.usage - _usage_of(objects)
            is_right = self._fits(off, _TOLERANCE) and self._fits(Usage(0, 0) - off, _TOLERANCE)
            candidates = [info for info in objects if info.key not in pinned]
            if not is_right or not self._fits(ledger.usage - _usage_of(candidates) + growth):
                candidates = [info for info in ledger.count() if info.key not in pinned]
                if not self._fits(ledger.usage - _usage_of(candidates) + growth):
                    raise NoSpaceError(
                        f"{growth.bytes} bytes more do not fit: {ledger.usage.bytes} of "
                        f"{self._max_bytes} bytes and {ledger.usage.files} of {self._max_files} "
                        "files are taken and may not be evicted",
                        op="put",
                        store=self.url,
                        key=key,
                    )
        left = iter(candidates)
        while True:
            with self._locked() as ledger:
                for _ in range(_BATCH):
                    is_enough = self._fits(ledger.usage, _LOW_WATER)
                    if is_enough and self._fits(ledger.usage + growth):
                        return
                    if (candidate := next(left, None)) is None:
                        return
                    if self._files.stat(candidate.key) == candidate:  # not used or replaced since
                        with ledger.changing(candidate.size, None):
                            self._files.delete(candidate.key)

    def _fits(self, usage: Usage, part: float = 1.0) -> bool:
        return usage.bytes <= part * self._max_bytes and usage.files <= part * self._max_files

    @_in_time
    def delete(self, name: str) -> None:
        """Remove an object, if it is there, and our record of it."""
        key = self._namespace + name
        with self._locked() as ledger:
            self._pending.remove(key)
            before = ledger.size_of(key)
            if before is not None:
                with ledger.changing(before, None):
                    self._files.delete(key)

    @_in_time
    def quarantine(self, name: str, data: Buffer | None = None) -> None:
        """Move a corrupt object to where a person can look at it, unless it is not ``data`` now."""
        key = self._namespace + name
        with self._locked() as ledger:
            before = ledger.size_of(key)
            if before is None or self._was_replaced(key, data):
                return
            quarantine = self._files.directory("quarantine", make=True)
            aside = f"{time.time_ns():020d}-{quote(key, safe='')}"[:255]
            with ledger.changing(before, None):
                self._files.move(key, quarantine, aside)
            self._pending.remove(key)
            for old in sorted(quarantine.names())[:-_QUARANTINED_FILES]:
                os.unlink(old, dir_fd=quarantine.fd)

    # -- what is still to upload

    @_in_time
    def uploaded(self, name: str, data: Buffer | None = None) -> bool:
        """Forget that ``name`` is to be uploaded: it may be evicted now.

        Return False if it is not ``data`` any more: what replaced it is still to be uploaded.
        """
        key = self._namespace + name
        with self._locked():
            is_current = not self._was_replaced(key, data)
            if is_current:
                self._pending.remove(key)
            return is_current

    def _was_replaced(self, key: str, data: Buffer | None) -> bool:
        info = None if data is None else self._files.stat(key)
        if data is None or info is None:
            return False
        view = memoryview(data).cast("B")
        beginning = self._files.read(key, 0, _BEGINNING_BYTES)
        return info.size != view.nbytes or beginning != bytes(view[:_BEGINNING_BYTES])

    @_in_time
    def pending(self) -> list[str]:
        """List the names that this process is to upload, saved here or adopted."""
        return self._names(self._pending.mine(self._namespace))

    @_in_time
    def recorded(self) -> set[str]:
        """List the names of this tier that any process, dead or alive, has still to upload."""
        return {*self._names(self._pending.all_pending(self._namespace))}

    @_in_time
    def pending_object(self, name: str) -> tuple[bytes, bytes | None] | None:
        """Return the bytes of a pending object, and the note on it if another process saved it.

        Return ``None`` if it is not pending here, or gone and therefore no longer pending.
        """
        key = self._namespace + name
        data, note = self._files.read(key), self._pending.note_of(key)
        if data is None and note is not None:
            with self._locked() as ledger:
                if ledger.size_of(key) is None:  # it was not just being put
                    self._pending.remove(key)
        if data is None or note is None:
            return None
        return data, note if self._pending.is_adopted(key) else None

    @_in_time
    def adopt(self, limit: int | None = None, but: Collection[str] = ()) -> list[str]:
        """Take over up to ``limit`` uploads of processes that are gone, ``but`` some; return them.

        Of any number of processes that try at once, exactly one gets each name.
        """
        with self._locked():
            keys = {self._namespace + name for name in but}
            return self._names(self._pending.adopt(self._namespace, limit, keys))

    @_in_time
    def give_back(self, name: str) -> bool:
        """Leave what was adopted to another process, at once; return False if it is our own."""
        key = self._namespace + name
        with self._locked():
            is_adopted = self._pending.is_adopted(key)
            if is_adopted:
                self._pending.give_back(key)
            return is_adopted

    def close(self, timeout_s: float | None = None) -> None:
        """Leave what is not uploaded to other processes; where the disk hangs, when it is back."""
        limit_s = self.deadline.limit_s
        more_s = 0.0 if timeout_s is None else min(timeout_s - limit_s, 0.0)
        with contextlib.suppress(StoreError, ConfigError, OSError):
            self.deadline.call(self._close, more_s=more_s)
        self.deadline.release()

    def _close(self) -> None:
        try:
            with self._locked():
                self._pending.close()
        finally:
            self._pending.release()

    def _names(self, keys: Iterable[str]) -> list[str]:
        return [key[len(self._namespace) :] for key in keys]


def _usage_of(objects: list[ObjectInfo]) -> Usage:
    return Usage(sum(info.size for info in objects), len(objects))


def _oldest_first(files: ObjectFiles) -> list[ObjectInfo]:
    return sorted(files.walk(), key=lambda info: info.modified)
