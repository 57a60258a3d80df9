"""The disk tier: entries on this machine, within bounds, and records of pending uploads.

Beside ``objects/`` and ``staging/`` (see :class:`~s3cache.store.ObjectFiles`), its root contains::

    usage               the size of objects/; the lock on every change
    pending/            records of pending uploads, see s3cache.tier._pending
    remotes/<namespace> the URL that the uploads of a namespace go to

The file ``usage`` is one record (little-endian), ``exact:? counted:i64 bytes:i64 files:i64``. A
writer locks the file, marks the record as inexact, changes the directory, and writes the record
again. A process that takes the lock and finds no exact record, as after a kill, counts the files.
Changes by hand are noticed when the tier is full and the last count is a day old.

The modification time of an object is its last use; the oldest are evicted first. Other processes
wait while a writer makes room, so with many objects it looks at a sample and evicts its oldest.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import os
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, TypeVar, cast

from s3cache.errors import (
    ConfigError,
    NoSpaceError,
    ReadOnlyError,
    StoreError,
    TransientError,
)
from s3cache.stats import Usage
from s3cache.store import (
    AcceptSize,
    Buffer,
    Directory,
    NotAccepted,
    ObjectFiles,
    ObjectInfo,
    Store,
    mark_used,
    os_errors,
)
from s3cache.tier._pending import Pending
from s3cache.util.threads import DeadlineExecutor, call_in_child, close_unshared

_F = TypeVar("_F", bound=Callable[..., Any])
_T = TypeVar("_T")

_last_use = attrgetter("modified")
# Different entries differ in the digests and signatures at their beginning.
_BEGINNING_BYTES = 4096
# A slow disk does not count as hanging: a call may take a second more for this many bytes.
_BYTES_A_SECOND = 32 << 20
_VERIFIED_HERE = 16 << 20  # within the deadline
# A call that looks at all objects may take this much longer. No lookup or save waits for it.
_SCAN_S = 120.0
LOCK_TIMEOUT_S = 4.0
_RECORD, _INEXACT = struct.Struct("<?qqq"), b"\0"
_COUNTED_EVERY_S = 86_400
# A writer without room evicts down to this fraction of a bound, so that the next writers have room,
_LOW_WATER = 0.90
# but not many objects more than it needs, because others wait. It looks at some 250 objects first,
# at some 4,000 if the oldest quarter of these is not enough, and at all of them last.
_EVICTED_OF_SOME, _EVICTED_OF_ALL = 16, 512
_LOOKED_AT, _OLD_PART = (256, 4096), 4


def namespace_of(identity: str) -> str:
    """Return the namespace of the remote with this identity."""
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


def _in_time(method: _F) -> _F:
    """Make a method raise ``StoreError`` at the deadline, even if the disk hangs."""

    @functools.wraps(method)
    def limited(tier: DiskTier, /, *args: Any, **kwargs: Any) -> Any:
        def call() -> Any:
            name = args[0] if args and isinstance(args[0], str) else ""
            with os_errors(method.__name__, tier.url, name):
                return method(tier, *args, **kwargs)

        return tier.deadline.call(call)

    return cast(_F, limited)


class DiskTier:
    """Objects on the local disk, at most ``max_bytes`` and ``max_files`` of them. Synchronous.

    Any number of threads and processes of a machine may use the same root at once. The bounds apply
    to the objects; each writer may have one more in staging. Pending objects are never evicted.
    Every method may raise :class:`~s3cache.errors.StoreError`, and ends within seconds even if the
    disk hangs: then its work continues and may end later.

    Args:
        namespace: separates the names of this tier from those of other tiers in the same root,
            which share its bounds: objects of different remotes may not be equally trusted.
        remote: the URL that its uploads go to, to name it in messages.

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
        remote: str = "",
    ) -> None:
        self._namespace = f"{namespace}/" if namespace else ""
        self._remote = remote
        self._max_bytes, self._max_files = max_bytes, max_files
        self._usage = Usage(0, 0)  # exact while the lock is held
        self._renew()
        call_in_child(self._renew)
        self.deadline = DeadlineExecutor.of(os.path.abspath(os.fspath(root)))
        try:
            self.deadline.call(lambda: self._open(root))
        except BaseException:
            self.deadline.release()
            raise

    def _renew(self) -> None:
        # Threads of a process wait here without polling; the lock on the file must be polled. A
        # forked child needs a new mutex: a thread of the parent may have held the old one.
        self._mutex = threading.Lock()
        #: How many of our pending objects another program removed before their upload.
        self.vanished = 0

    def _open(self, root: str | os.PathLike[str]) -> None:
        self._files = ObjectFiles(root)
        self.root, self.url = self._files.root, self._files.url
        self._pending = Pending(lambda make: self._files.directory("pending", make=make))
        self.usage()  # the first process counts; fail now if the count cannot be written

    # -- the lock and the usage

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock all objects and read their usage; raise TransientError if another holds the lock."""

        def busy(holder: str) -> TransientError:
            problem = f"{holder} has held {self.root}/usage for {LOCK_TIMEOUT_S:g} s"
            return TransientError(problem, op="lock", store=self.url)

        mutex = self._mutex  # a child that is forked inside the block has another one
        deadline, pause_s = time.monotonic() + LOCK_TIMEOUT_S, 0.0001
        if not mutex.acquire(timeout=LOCK_TIMEOUT_S):
            raise busy("another thread")
        try:
            while (fd := self._files.directory(make=True).try_lock("usage")) is None:
                if time.monotonic() > deadline:
                    raise busy("another process")
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.005)
            try:
                self._fd = fd
                record = os.pread(fd, _RECORD.size + 1, 0)
                exact, *counts = _RECORD.unpack(record) if len(record) == _RECORD.size else [False]
                if exact and min(counts) >= 0:
                    self._counted, self._usage = counts[0], Usage(*counts[1:])
                else:
                    self._count()
                yield
            finally:
                close_unshared(fd)
        finally:
            mutex.release()

    def _count(self) -> list[ObjectInfo]:
        """Correct the usage by counting all objects; return them, oldest first."""
        objects = sorted(self._files.walk(), key=_last_use)
        self._counted, self._usage = int(time.time()), _usage_of(objects)
        os.ftruncate(self._fd, _RECORD.size)
        self._write_usage()
        return objects

    def _write_usage(self) -> None:
        record = _RECORD.pack(True, self._counted, self._usage.bytes, self._usage.files)
        os.pwrite(self._fd, record, 0)

    @contextlib.contextmanager
    def _changing(self, growth: Usage) -> Iterator[None]:
        """Record the growth by the block. If the block fails, the next process counts."""
        os.pwrite(self._fd, _INEXACT, 0)
        yield
        self._usage += growth
        self._write_usage()

    @_in_time
    def usage(self) -> Usage:
        """Return bytes and files of all namespaces, exact at the moment of the call."""
        try:
            with os_errors("usage", self.url), self._locked():
                return self._usage
        except ReadOnlyError:  # no process can change the objects or the record
            return _usage_of([*self._files.walk()])

    # -- reading

    @_in_time
    def search(
        self, names: Iterable[str], prefix: str, verify: Callable[[str, bytes], _T]
    ) -> tuple[str, bytes, _T | None] | list[ObjectInfo]:
        """Find the first of ``names`` and mark it as used, or list the objects with ``prefix``.

        Unless the object is large, ``verify`` gets the bytes while they are in this core's cache.
        """
        for name in names:
            data = self._files.read(self._namespace + name, is_use=True)
            if data is not None:
                return name, data, verify(name, data) if len(data) <= _VERIFIED_HERE else None
        return self.objects(prefix)

    @_in_time
    def get(self, name: str) -> bytes | None:
        """Return the object's bytes, or ``None``; mark it as used now."""
        return self._files.read(self._namespace + name, is_use=True)

    @_in_time
    def peek(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        """Return the object's bytes, or ``length`` of them, or ``None``; this is not a use."""
        return self._files.read(self._namespace + name, start, length)

    @_in_time
    def head(self, name: str) -> ObjectInfo | None:
        """Return size and last use of the object, or ``None``; not a use of the object."""
        info = self._files.stat(self._namespace + name)
        return info and replace(info, key=name)

    def objects(self, prefix: str = "") -> list[ObjectInfo]:
        """List all objects with ``prefix``, last used first; ``modified`` is the last use."""
        walk = functools.partial(self._files.walk, self._namespace + prefix)
        present = self.deadline.call(lambda: [*walk()], more_s=0.0 if prefix else _SCAN_S)
        present.sort(key=_last_use, reverse=True)
        return [replace(info, key=info.key[len(self._namespace) :]) for info in present]

    # -- writing

    def put(self, name: str, data: Buffer) -> None:
        """Write or replace an object, evicting the least recently used to make room.

        It survives this process but perhaps not a power failure. Raises NoSpaceError if it is
        larger than the tier, or if no more objects may be evicted.
        """
        self._put(name, data, pending=False)

    def put_pending(self, name: str, data: Buffer, *, once: bool = False) -> bool:
        """Put an object and record that its upload is pending, until :meth:`uploaded`.

        When this returns, the bytes have reached the disk. If the process ends before the upload,
        exactly one other process takes it over with :meth:`adopt`. If this fails, an earlier record
        of the name stays. With ``once``, keep an existing object, which another process uploads or
        has uploaded, and return False.
        """
        return self._put(name, data, pending=True, once=once)

    def _put(self, name: str, data: Buffer, *, pending: bool, once: bool = False) -> bool:
        key, size = self._namespace + name, memoryview(data).nbytes
        if size > self._max_bytes:
            problem = f"{size} bytes are more than the {self._max_bytes} allowed"
            raise NoSpaceError(problem, op="put", store=self.url, key=key)

        def write() -> bool:
            if pending:
                self._note_remote()
            if once and self._files.stat(key) is not None:
                return False
            with self._files.staged(key, data, durable=pending) as staged, self._locked():
                held = staged.replaced_bytes()
                if once and held is not None:
                    staged.drop()
                    return False
                growth = Usage(size, 1) if held is None else Usage(size - held, 0)
                self._make_room(key, growth)
                # The record first: an uploader drops a record without an object, but an object
                # without a record would never be uploaded.
                is_new = pending and self._pending.add(key)
                try:
                    with self._changing(growth):
                        mark_used(staged.fd)
                        staged.place()
                except BaseException:
                    if is_new:
                        self._pending.remove(key)
                    raise
            return True

        return self.deadline.call(write, more_s=size / _BYTES_A_SECOND)

    def _note_remote(self) -> None:
        """Write the URL of the remote once, for processes with another one."""
        if self._remote and self._namespace:
            with contextlib.suppress(OSError):
                remotes = self._files.directory("remotes", make=True)
                fd = remotes.open_private(self._namespace[:-1], os.O_WRONLY | os.O_CREAT)
                try:
                    os.write(fd, self._remote.encode())
                finally:
                    close_unshared(fd)
            self._remote = ""

    def _usage_of(self, key: str) -> Usage:
        info = self._files.stat(key)
        return Usage(0, 0) if info is None else Usage(info.size, 1)

    def _make_room(self, key: str, growth: Usage) -> None:
        """Evict the oldest objects, but not ``key``, until ``growth`` fits, and some more.

        If it cannot fit, evict nothing and raise NoSpaceError.
        """
        if self._fits(self._usage + growth):
            return
        pinned = {*self._pending.all_pending(), *self._pending.promised, key}
        is_recent = time.time() - self._counted < _COUNTED_EVERY_S
        for number in _LOOKED_AT if is_recent else ():
            if (one_in := self._usage.files // number) > 1:
                some = sorted(self._files.walk(one_in=one_in), key=_last_use)
                oldest = some[: len(some) // _OLD_PART]
                candidates = [info for info in oldest if info.key not in pinned]
                if self._fits(self._usage - _usage_of(candidates) + growth):
                    self._evict(candidates, growth, _EVICTED_OF_SOME)
                    return
        candidates = [info for info in self._count() if info.key not in pinned]
        if not self._fits(self._usage - _usage_of(candidates) + growth):
            raise NoSpaceError(
                f"{growth.bytes} more bytes do not fit: {self._usage.bytes} of {self._max_bytes} "
                f"bytes and {self._usage.files} of {self._max_files} files are in use and cannot "
                "be evicted",
                op="put",
                store=self.url,
                key=key,
            )
        self._evict(candidates, growth, _EVICTED_OF_ALL)

    def _evict(self, candidates: list[ObjectInfo], growth: Usage, most_spare: int) -> None:
        for number, info in enumerate(candidates):
            is_enough = number >= most_spare or self._fits(self._usage, _LOW_WATER)
            if is_enough and self._fits(self._usage + growth):
                return
            with self._changing(Usage(-info.size, -1)):
                self._files.delete(info.key)

    def _fits(self, usage: Usage, part: float = 1.0) -> bool:
        return usage.bytes <= part * self._max_bytes and usage.files <= part * self._max_files

    @_in_time
    def delete(self, name: str, data: Buffer | None = None) -> None:
        """Remove an object and our record of it; with ``data``, only if its bytes are equal."""
        key = self._namespace + name
        with self._locked():
            if self._was_replaced(key, data):
                return
            self._pending.remove(key)
            if (held := self._usage_of(key)).files:
                with self._changing(Usage(0, 0) - held):
                    self._files.delete(key)

    def in_time(self, op: str, work: Callable[[Directory], _T]) -> _T:
        """Return the result of ``work`` on the directory for locks, ``claims``."""

        def call() -> _T:
            with os_errors(op, self.url):
                return work(self._files.directory("claims", make=True))

        return self.deadline.call(call)

    # -- pending uploads

    @_in_time
    def uploaded(self, names: Mapping[str, Buffer | None]) -> list[str]:
        """Remove the records of ``names``, which are uploaded: they may be evicted now.

        The values are the uploaded bytes, or None for any. Return the names that have other bytes
        now: their uploads stay pending.
        """
        replaced = []
        with self._locked():
            for name, data in names.items():
                if self._was_replaced(key := self._namespace + name, data):
                    replaced.append(name)
                else:
                    self._pending.remove(key)
        return replaced

    def _was_replaced(self, key: str, data: Buffer | None) -> bool:
        if data is None:
            return False
        beginning = self._files.read(key, 0, _BEGINNING_BYTES)
        return beginning not in (None, bytes(memoryview(data)[:_BEGINNING_BYTES]))

    @_in_time
    def pending(self) -> list[str]:
        """List the pending uploads of this process, its own and adopted ones."""
        return self._names(self._pending.mine())

    @_in_time
    def recorded(self) -> set[str]:
        """List the pending uploads of all processes in this tier, dead or alive."""
        return {*self._names(self._pending.all_pending())}

    @_in_time
    def left_for_others(self) -> dict[str, int]:
        """Count the uploads that dead processes left for other remotes, by the remote's URL.

        They are only uploaded by a process with that URL. It may be the same bucket, under another
        spelling of its server.
        """
        keys = [key for key in self._pending.abandoned() if not key.startswith(self._namespace)]
        counts = Counter(key.partition("/")[0] for key in keys)
        return {self._remote_of(namespace): count for namespace, count in counts.items()}

    def _remote_of(self, namespace: str) -> str:
        with contextlib.suppress(OSError):
            remotes = self._files.directory("remotes")
            fd = os.open(namespace, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=remotes.fd)
            with open(fd, encoding="utf-8", errors="replace") as file:
                return file.read(_BEGINNING_BYTES)
        return f"an unknown remote ({namespace})"

    def _names(self, keys: Iterable[str]) -> list[str]:
        start = len(self._namespace)
        return [key[start:] for key in keys if key.startswith(self._namespace)]

    @_in_time
    def pending_object(self, name: str) -> tuple[bytes, bool] | None:
        """Return the bytes of a pending object, and whether another process saved it.

        Return ``None`` if it is not pending here. If the object is gone, drop its record. If only
        the record of our own object is gone, as after a cleaner of old files, it is still pending.
        """
        key = self._namespace + name
        data, is_pending = self._files.read(key), self._is_pending(key)
        if data is None and is_pending:
            with self._locked():
                # Nothing is being put right now, and no other thread has done this.
                if not self._usage_of(key).files and self._is_pending(key):
                    self.vanished += key in self._pending.promised
                    self._pending.remove(key)
        if data is None or not is_pending:
            return None
        return data, key in self._pending.adopted

    def _is_pending(self, key: str) -> bool:
        return key in self._pending.promised or self._pending.holds(key)

    @_in_time
    def adopt(self, limit: int | None = None, but: Iterable[str] = ()) -> list[str]:
        """Take over up to ``limit`` uploads of dead processes, except ``but``; return their names.

        If several processes try at once, exactly one gets each name.
        """
        with self._locked():
            keys = {self._namespace + name for name in but}
            return self._names(self._pending.adopt(self._namespace, limit, keys))

    @_in_time
    def give_back(self, name: str) -> bool:
        """Return an adopted upload, so that others can adopt it; return False if it is our own."""
        with self._locked():
            return self._pending.give_back(self._namespace + name)

    def close(self, timeout_s: float | None = None) -> None:
        """Leave pending uploads to other processes; if the disk hangs, once it is back."""
        limit_s = self.deadline.limit_s
        more_s = 0.0 if timeout_s is None else min(timeout_s - limit_s, 0.0)
        with contextlib.suppress(StoreError, ConfigError, OSError):
            self.deadline.call(self._pending.close, more_s=more_s)
        self.deadline.release()


def _usage_of(objects: list[ObjectInfo]) -> Usage:
    return Usage(sum(info.size for info in objects), len(objects))


class TierStore(Store):
    """A disk tier as a store: reading does not count as use, and closing closes the tier."""

    def __init__(self, tier: DiskTier) -> None:
        self._tier = tier

    @property
    def url(self) -> str:
        return self._tier.url

    async def get(self, key: str, accept_size: AcceptSize | None = None) -> Any:
        data = await asyncio.to_thread(self._tier.peek, key)
        if data is None or accept_size is None or accept_size(len(data)):
            return data
        return NotAccepted(len(data))

    async def get_range(self, key: str, start: int, length: int) -> Buffer | None:
        return await asyncio.to_thread(self._tier.peek, key, start, length)

    async def head(self, key: str) -> ObjectInfo | None:
        return await asyncio.to_thread(self._tier.head, key)

    async def put(self, key: str, data: Buffer, **_: Any) -> None:
        await asyncio.to_thread(self._tier.put, key, data)

    async def delete(self, key: str) -> None:
        await asyncio.to_thread(self._tier.delete, key)

    async def list_page(
        self, prefix: str, after: str | None = None
    ) -> tuple[Sequence[ObjectInfo], str | None]:
        return [*await asyncio.to_thread(self._tier.objects, prefix)], None

    async def recorded(self) -> set[str]:
        return await asyncio.to_thread(self._tier.recorded)

    async def left_for_others(self) -> dict[str, int]:
        return await asyncio.to_thread(self._tier.left_for_others)

    async def atomic_create(self) -> bool:
        return False

    async def aclose(self) -> None:
        await asyncio.to_thread(self._tier.close)
