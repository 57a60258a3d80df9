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
import math
import os
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, TypeVar, cast

from s3cache import entries, frame
from s3cache.entries import Replaceable
from s3cache.errors import (
    ConfigError,
    CorruptError,
    NoSpaceError,
    ReadOnlyError,
    S3CacheError,
    StoreError,
    TransientError,
    UntrustedError,
)
from s3cache.frame import Frame, TrustCheck
from s3cache.settings import Settings
from s3cache.stats import Counters, Usage
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
from s3cache.util.logs import Problems
from s3cache.util.threads import DeadlineExecutor, call_in_child, close_unshared

_F = TypeVar("_F", bound=Callable[..., Any])
_T = TypeVar("_T")
_U = TypeVar("_U")

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
# The prefix of the marks of entries that raised at their first call, by digest.
_ASIDE = "aside/"
# How long a disk is not used after a failure: it may have room again later.
_REST_S = 60.0


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
    disk hangs: then its work continues and may end later. Opening it raises ConfigError if the root
    is not a private directory of this user.

    Args:
        namespace: separates the names of this tier from those of other tiers in the same root,
            which share its bounds: objects of different remotes may not be equally trusted.
        remote: the URL that its uploads go to, to name it in messages.
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
        problem = f"another process or thread has held {self.root}/usage for {LOCK_TIMEOUT_S:g} s"
        busy = functools.partial(TransientError, problem, op="lock", store=self.url)
        mutex = self._mutex  # a child that is forked inside the block has another one
        deadline, pause_s = time.monotonic() + LOCK_TIMEOUT_S, 0.0001
        if not mutex.acquire(timeout=LOCK_TIMEOUT_S):
            raise busy()
        try:
            while (fd := self._files.directory(make=True).try_lock("usage")) is None:
                if time.monotonic() > deadline:
                    raise busy()
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
    def peek(self, name: str, length: int | None = None) -> bytes | None:
        """Return the object's bytes, or ``length`` of them, or ``None``; this is not a use."""
        return self._files.read(self._namespace + name, length)

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

    def put_pending(self, name: str, data: Buffer, *, once: bool = False) -> bool:
        """Put an object and record that its upload is pending, until :meth:`forget_uploaded`.

        When this returns, the bytes have reached the disk. If the process ends before the upload,
        exactly one other process takes it over with :meth:`adopt`. If this fails, an earlier record
        of the name stays. With ``once``, keep an existing object, which another process uploads or
        has uploaded, and return False.
        """
        return self.put(name, data, pending=True, once=once)

    def put(self, name: str, data: Buffer, *, pending: bool = False, once: bool = False) -> bool:
        """Write or replace an object, evicting the least recently used to make room.

        It survives this process but perhaps not a power failure. Raises NoSpaceError if it is
        larger than the tier, or if no more objects may be evicted.
        """
        key, size = self._namespace + name, memoryview(data).nbytes
        if size > self._max_bytes:
            problem = f"{size} bytes are more than the {self._max_bytes} allowed"
            raise NoSpaceError(problem, op="put", store=self.url, key=key)

        def write() -> bool:
            if pending and self._remote and self._namespace:
                self._note_remote()
            if once and self._files.stat(key) is not None:
                return False
            with self._files.staged(key, data, durable=pending) as staged, self._locked():
                held = staged.replaced_bytes()
                if once and held is not None:
                    staged.drop()
                    return False
                growth = Usage(size - (held or 0), int(held is None))
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
        with contextlib.suppress(OSError):
            remotes = self._files.directory("remotes", make=True)
            fd = remotes.open_private(self._namespace[:-1], os.O_WRONLY | os.O_CREAT)
            try:
                os.write(fd, self._remote.encode())
            finally:
                close_unshared(fd)
        self._remote = ""

    def _make_room(self, key: str, growth: Usage) -> None:
        """Evict the oldest objects but ``key`` until ``growth`` fits, or raise NoSpaceError."""
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
            problem = (
                f"{growth.bytes} more bytes do not fit: {self._usage.bytes} of {self._max_bytes} "
                f"bytes and {self._usage.files} of {self._max_files} files are in use and cannot "
                "be evicted"
            )
            raise NoSpaceError(problem, op="put", store=self.url, key=key)
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
            if (held := self._files.stat(key)) is not None:
                with self._changing(Usage(-held.size, -1)):
                    self._files.delete(key)

    @_in_time
    def within(self, directory: str, work: Callable[[Directory], _T]) -> _T:
        """Return the result of ``work`` on a directory beside the objects."""
        return work(self._files.directory(directory, make=True))

    # -- pending uploads

    @_in_time
    def forget_uploaded(self, names: Mapping[str, Buffer | None]) -> list[str]:
        """Remove the records of ``names``, which are uploaded: they may be evicted now.

        The values are the uploaded bytes, or None for any. Return the names that have other bytes
        now: their uploads stay pending.
        """
        with self._locked():
            keys = {name: self._namespace + name for name in names}
            replaced = [name for name in names if self._was_replaced(keys[name], names[name])]
            for name in {*names} - {*replaced}:
                self._pending.remove(keys[name])
        return replaced

    def _was_replaced(self, key: str, data: Buffer | None) -> bool:
        if data is None:
            return False
        beginning = self._files.read(key, _BEGINNING_BYTES)
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
        """Count the uploads that dead processes left for other remotes, by the remote's URL."""
        # Only a process with that URL uploads them, even if it is another spelling of ours.
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
        own = (key for key in keys if key.startswith(self._namespace))
        return [key.removeprefix(self._namespace) for key in own]

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
                if self._files.stat(key) is None and self._is_pending(key):
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

    def close(self, timeout_s: float = math.inf) -> None:
        """Leave pending uploads to other processes; if the disk hangs, once it is back."""
        more_s = min(timeout_s - self.deadline.limit_s, 0.0)
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

    async def get_range(self, key: str, length: int) -> Buffer | None:
        return await asyncio.to_thread(self._tier.peek, key, length)

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


# -- the disk of a cache, which may be missing or fail


class LocalTier:
    """A disk tier that is not used for a minute after a failure.

    While it is not used, or without a disk, it looks empty and full. Errors are raised only if the
    cache is strict. ``error`` is that of the last read or write, if it failed.
    """

    def __init__(
        self,
        disk: DiskTier | None,
        counters: Counters,
        problems: Problems,
        replaceable: Replaceable,
        check_trust: TrustCheck | None = None,
    ) -> None:
        self.disk, self.check_trust = disk, check_trust
        self.error: Exception | None = None
        self._counters, self._problems, self._replaceable = counters, problems, replaceable
        self._unread_until = self._unwritten_until = 0.0
        self._marks: set[str] | None = None  # digests of entries that are not used, once read

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

        def sound(name: str, data: bytes) -> Frame | None:
            with contextlib.suppress(CorruptError, UntrustedError):
                return entries.verify(name, data, admit=self.check_trust)
            return None

        return self.read(lambda disk: disk.search(names, entries.name_prefix(key), sound), [])

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
        if self.disk is None or self.read_error is not None:
            return otherwise
        try:
            return read(self.disk)
        except S3CacheError as exc:
            self.error = exc
            self._unread_until = self._unwritten_until = time.monotonic() + _REST_S
            self._problems.raise_or_warn(
                "local", "the local tier failed and is not used for now", exc
            )
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
                self._problems.raise_or_warn(
                    "bound", "the local tier is too small for this entry", exc
                )
                return False
            self._unwritten_until = time.monotonic() + _REST_S
            self._problems.raise_or_warn("local", "the local tier cannot be written for now", exc)
            return False
        self.error = None
        return True

    def set_aside(self, entry: Frame) -> None:
        """Treat a sound but unusable entry as damaged: the next save replaces it."""
        self._replaceable.add(entry.digest)
        self.discard(entry)

    def mark(self, entry: Frame, why: str) -> None:
        """Set an entry aside for every process of this machine, also if it is fetched again."""
        digest = entry.digest.hex()
        self._marked().add(digest)
        self.set_aside(entry)
        self.write(lambda disk: disk.put(_ASIDE + digest, why.encode()))

    def is_marked(self, entry: Frame) -> bool:
        """Return whether an entry was marked; if so, the next save replaces it."""
        if is_marked := entry.digest.hex() in self._marked():
            self._replaceable.add(entry.digest)
        return is_marked

    def _marked(self) -> set[str]:
        if self._marks is None:
            marks = self.read(lambda disk: disk.objects(_ASIDE), [])
            self._marks = {info.key.removeprefix(_ASIDE) for info in marks}
        return self._marks

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
    problem, where, disk = None, "there is no local tier", None
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
