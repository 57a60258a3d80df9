"""The disk tier: entries on this machine, and what is still to be uploaded of them.

Beside ``objects/`` and ``staging/`` (see :class:`~s3cache.store.ObjectFiles`), its root holds::

    usage               how much is in objects/            (s3cache.tier._bounds)
    usage.scan          locked by the process that looks for old objects
    pending/<owner>/    what is not uploaded yet           (s3cache.tier._pending)
    quarantine/         the last few files found corrupt
    CACHEDIR.TAG        tells backup programs to leave all this out
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, TypeVar, overload
from urllib.parse import quote

from s3cache.errors import ConfigError, NoSpaceError, PreconditionError, ReadOnlyError, StoreError
from s3cache.stats import Usage
from s3cache.store import (
    AcceptSize,
    Buffer,
    NotAccepted,
    ObjectFiles,
    ObjectInfo,
    PutMode,
    mark_used,
    os_errors,
)
from s3cache.tier._bounds import Bounds
from s3cache.tier._pending import Pending
from s3cache.util.deadline import DeadlineExecutor

__all__ = ["DiskTier", "SearchResult", "TierStore"]

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


def _in_time(
    method: Callable[Concatenate[DiskTier, _P], _T],
) -> Callable[Concatenate[DiskTier, _P], _T]:
    """Have a method end within the deadline, whatever the disk does."""

    @functools.wraps(method)
    def limited(tier: DiskTier, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return tier.deadline.call(lambda: method(tier, *args, **kwargs))

    return limited


@dataclass(frozen=True)
class SearchResult:
    """The object that a search found, or what else there is.

    Attributes:
        name: of the object that was found; empty if there is none.
        data: its bytes, not verified.
        others: where none was found, what there is besides, the last used first.
    """

    name: str = ""
    data: bytes = b""
    others: Sequence[ObjectInfo] = ()


class DiskTier:
    """Objects on the local disk, at most ``max_bytes`` and ``max_files`` of them. Synchronous.

    Any number of threads and processes of one machine may use the same root at once. The bounds
    hold for the objects; each writer may have one more in staging. Objects that are recorded as
    pending are never evicted.

    Every method may raise :class:`~s3cache.errors.StoreError`, and ends within a few seconds, also
    where the disk hangs: as a :class:`~s3cache.errors.TransientError` if it has not answered in
    time (what was begun goes on, and may end later), as a
    :class:`~s3cache.errors.CircuitOpenError` if nothing was tried.

    Args:
        namespace: keeps this tier's names apart from those of others in the same root, which share
            its bounds. Objects of different places need not be equally trusted.
        note: kept in each record made here, for the process that uploads the object.

    Raises:
        ConfigError: the root is not a private directory of this user.
        StoreError: it cannot be created or written.
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
        self.deadline = DeadlineExecutor.of(os.path.abspath(os.fspath(root)))
        try:
            self._open(root, max_bytes, max_files, note)
        except BaseException:
            self.deadline.release()
            raise

    @_in_time
    def _open(
        self, root: str | os.PathLike[str], max_bytes: int, max_files: int, note: bytes
    ) -> None:
        self._files = ObjectFiles(root)
        self.root = self._files.root
        self.url = self._files.url
        self._pending = Pending(lambda make: self._files.directory("pending", make=make), note)
        self._bounds = Bounds(
            self._files,
            max_bytes=max_bytes,
            max_files=max_files,
            pinned=self._pending.all_pending,
        )
        with (
            contextlib.suppress(ReadOnlyError),
            os_errors("open", self.url),
            contextlib.suppress(FileExistsError),
        ):
            self._files.sweep()
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            fd = os.open("CACHEDIR.TAG", flags, 0o600, dir_fd=self._files.directory().fd)
            with os.fdopen(fd, "wb") as file:
                file.write(_CACHEDIR_TAG)
        self.usage()  # the first process counts; fails now if that cannot be written

    @_in_time
    def usage(self) -> Usage:
        """Return bytes and files held, by all namespaces, exact at the moment of the call."""
        try:
            with os_errors("usage", self.url), self._bounds.locked() as ledger:
                return ledger.usage
        except ReadOnlyError:  # no process changes it, or could write how much there is
            sizes = [info.size for info in self._files.walk()]
            return Usage(sum(sizes), len(sizes))

    # -- reading

    @_in_time
    def search(self, names: Sequence[str], prefix: str) -> SearchResult:
        """Find the first of ``names``, marked as used, or list what there is with ``prefix``.

        One call, as each call is made by another thread. Nothing is verified.
        """
        for name in names:
            data = self._files.use(self._namespace + name)
            if data is not None:
                return SearchResult(name, data)
        return SearchResult(others=self._objects(prefix))

    @_in_time
    def get(self, name: str) -> bytes | None:
        """Return the object's bytes, or ``None``; mark it as used just now."""
        return self._files.use(self._namespace + name)

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
        """List all objects with ``prefix``, the last used first.

        ``modified`` is the time of last use.
        """
        more_s = 0.0 if prefix else _SCAN_S
        return self.deadline.call(lambda: self._objects(prefix), more_s=more_s)

    def _objects(self, prefix: str) -> list[ObjectInfo]:
        present = [
            ObjectInfo(info.key[len(self._namespace) :], info.size, info.modified)
            for info in self._files.walk(self._namespace + prefix)
        ]
        return sorted(present, key=lambda info: info.modified, reverse=True)

    # -- writing

    def put(self, name: str, data: Buffer) -> None:
        """Write or replace an object, evicting the least recently used to make room.

        It survives this process but perhaps not a power failure, after which it is had again.

        Raises:
            NoSpaceError: it is larger than the tier, or what is there may not be evicted.
        """
        self._put_in_time(name, data, pending=False)

    def put_pending(self, name: str, data: Buffer) -> None:
        """Put an object that only this process has, and have it pending.

        When this returns, the bytes have reached the disk, and it is on record that this process
        uploads them, until :meth:`uploaded` is called. If the process ends before, exactly one
        other takes that over with :meth:`adopt`. A power failure may take object and record, but
        never leaves a part. Where this fails, an earlier record of the same name stays.

        Raises:
            NoSpaceError: see :meth:`put`.
            ClosedError: :meth:`close` was called.
        """
        self._put_in_time(name, data, pending=True)

    def _put_in_time(self, name: str, data: Buffer, *, pending: bool) -> None:
        self.deadline.call(
            lambda: self._put(name, data, pending=pending),
            more_s=memoryview(data).nbytes / _BYTES_A_SECOND,
        )

    def _put(self, name: str, data: Buffer, *, pending: bool) -> None:
        key, size = self._namespace + name, memoryview(data).nbytes
        if size > self._bounds.max_bytes:
            problem = f"{size} bytes are more than the {self._bounds.max_bytes} allowed"
            raise NoSpaceError(problem, op="put", store=self.url, key=key)
        with (
            self._files.staged(key, data, durable=pending) as staged,
            self._bounds.reserve(key, size) as (ledger, before),
        ):
            # First: an uploader forgets a pending upload without an object, but an object that is
            # not pending would never be uploaded.
            is_new = pending and self._add_pending(key)
            try:
                with ledger.changing(before, size):
                    mark_used(staged.fd)
                    self._files.rename(staged, key)
            except BaseException:
                if is_new:
                    self._pending.remove(key)
                raise

    def _add_pending(self, key: str) -> bool:
        try:
            return self._pending.add(key)
        except FileNotFoundError:  # our directory was removed: make another
            self._pending.release()
            return self._pending.add(key)

    @_in_time
    def delete(self, name: str) -> None:
        """Remove an object, if it is there, and our record of it."""
        key = self._namespace + name
        with os_errors("delete", self.url, key), self._bounds.locked() as ledger:
            self._pending.remove(key)
            before = ledger.size_of(key)
            if before is not None:
                with ledger.changing(before, None):
                    self._files.delete(key)

    @_in_time
    def quarantine(self, name: str, data: Buffer | None = None) -> None:
        """Move a corrupt object to where a person can look at it, and forget our record of it.

        Only the last few are kept.

        Args:
            data: what the object held; nothing happens if it was replaced since.
        """
        key = self._namespace + name
        with os_errors("quarantine", self.url, key), self._bounds.locked() as ledger:
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
        """Forget that ``name`` is to be uploaded; from now on it may be evicted.

        Args:
            data: what was uploaded.

        Returns:
            False if the object was replaced since: then it still has to be uploaded.
        """
        key = self._namespace + name
        with os_errors("uploaded", self.url, key), self._bounds.locked():
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
        with os_errors("pending", self.url):
            return self._names(self._pending.mine(self._namespace))

    @_in_time
    def recorded(self) -> set[str]:
        """List the names of this tier that any process, dead or alive, has still to upload."""
        with os_errors("recorded", self.url):
            keys = self._pending.all_pending()
            return {*self._names(key for key in keys if key.startswith(self._namespace))}

    @_in_time
    def pending_object(self, name: str) -> tuple[bytes, bytes | None] | None:
        """Return the bytes of a pending object, and the note on it if another process saved it.

        Returns:
            ``None`` if it is not pending here, or gone and therefore no longer pending.
        """
        key = self._namespace + name
        with os_errors("pending_object", self.url, key):
            data, note = self._files.read(key), self._pending.note_of(key)
            if data is None and note is not None:
                with self._bounds.locked() as ledger:
                    if ledger.size_of(key) is None:  # it was not just being put
                        self._pending.remove(key)
            if data is None or note is None:
                return None
            return data, note if self._pending.is_adopted(key) else None

    @_in_time
    def adopt(self, limit: int | None = None, but: Collection[str] = ()) -> list[str]:
        """Take over what processes that are gone have left to upload; return the names.

        Of any number of processes that try at once, exactly one gets each name.

        Args:
            limit: so many at most.
            but: names to leave to others.
        """
        with os_errors("adopt", self.url), self._bounds.locked():
            keys = {self._namespace + name for name in but}
            return self._names(self._pending.adopt(self._namespace, limit, keys))

    @_in_time
    def give_back(self, name: str) -> bool:
        """Leave what was adopted to another process, at once; return False if it is our own."""
        key = self._namespace + name
        with os_errors("give_back", self.url, key), self._bounds.locked():
            is_adopted = self._pending.is_adopted(key)
            if is_adopted:
                self._pending.give_back(key)
            return is_adopted

    def close(self, timeout_s: float | None = None) -> None:
        """Leave what is not uploaded to other processes, and take nothing more.

        Where the disk hangs, that happens when it is back.
        """
        limit_s = self.deadline.limit_s
        less_s = limit_s - min(limit_s if timeout_s is None else timeout_s, limit_s)
        with contextlib.suppress(StoreError, ConfigError):
            self.deadline.call(self._close, more_s=-less_s)
        self.deadline.release()

    def _close(self) -> None:
        try:
            with os_errors("close", self.url), self._bounds.locked():
                self._pending.close()
        finally:
            self._pending.release()

    def _names(self, keys: Iterable[str]) -> list[str]:
        return [key[len(self._namespace) :] for key in keys]


class TierStore:
    """A :class:`~s3cache.store.Store` of what a tier holds, which keeps its usage right.

    Closing it closes the tier. What is read here does not count as used. What is removed is not
    uploaded any more.
    """

    def __init__(self, tier: DiskTier) -> None:
        self._tier = tier

    @property
    def url(self) -> str:
        return self._tier.url

    @overload
    async def get(self, key: str) -> Buffer | None: ...
    @overload
    async def get(
        self, key: str, accept_size: AcceptSize | None
    ) -> Buffer | NotAccepted | None: ...
    async def get(
        self, key: str, accept_size: AcceptSize | None = None
    ) -> Buffer | NotAccepted | None:
        data = await asyncio.to_thread(self._tier.peek, key)
        if data is not None and accept_size is not None and not accept_size(len(data)):
            return NotAccepted(len(data))
        return data

    async def get_range(self, key: str, start: int, length: int) -> Buffer | None:
        return await asyncio.to_thread(self._tier.peek, key, start, length)

    async def head(self, key: str) -> ObjectInfo | None:
        return await asyncio.to_thread(self._tier.head, key)

    async def put(
        self,
        key: str,
        data: Buffer,
        *,
        mode: PutMode = "overwrite",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        if mode == "create" and await asyncio.to_thread(self._tier.holds, key):
            raise PreconditionError("already exists", op="put", store=self.url, key=key)
        await asyncio.to_thread(self._tier.put, key, data)

    async def delete(self, key: str) -> None:
        await asyncio.to_thread(self._tier.delete, key)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        for info in await asyncio.to_thread(self._tier.objects, prefix):
            yield info

    async def recorded(self) -> set[str]:
        """Return the names that are still to be uploaded."""
        return await asyncio.to_thread(self._tier.recorded)

    async def atomic_create(self) -> bool:
        return False

    async def connect(self) -> None:
        pass

    def written_as(self, note: bytes) -> TierStore:
        return self

    async def aclose(self) -> None:
        await asyncio.to_thread(self._tier.close)
