"""Stores that need no server: a dict, and files in a directory that machines may share."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import TypeVar, overload

from s3cache.errors import PreconditionError, ReadOnlyError
from s3cache.store._base import (
    AcceptSize,
    Buffer,
    NotAccepted,
    ObjectInfo,
    PutMode,
    check_key,
    check_range,
)
from s3cache.store._deadline import DeadlineExecutor
from s3cache.store._objects import ObjectFiles

__all__ = ["FileStore", "MemoryStore"]

_T = TypeVar("_T")

# The time limit in those of a local disk, and a second more for so many bytes.
_TIMES_AS_LONG = 3
_BYTES_A_SECOND = 8 << 20
_MAX_TRANSFER_S = 600.0


class MemoryStore:
    """A :class:`~s3cache.store.Store` in this process's memory, for tests and trials.

    Objects are copied in and immutable from then on. ``put`` is atomic and
    :meth:`atomic_create` holds, because no call gives up the event loop half-way.
    """

    def __init__(self, name: str = "") -> None:
        self._url = f"memory://{name}"
        self._objects: dict[str, tuple[bytes, float]] = {}

    def __repr__(self) -> str:
        return f"MemoryStore({self._url!r})"

    @property
    def url(self) -> str:
        return self._url

    @overload
    async def get(self, key: str) -> Buffer | None: ...
    @overload
    async def get(
        self, key: str, accept_size: AcceptSize | None
    ) -> Buffer | NotAccepted | None: ...
    async def get(
        self, key: str, accept_size: AcceptSize | None = None
    ) -> Buffer | NotAccepted | None:
        value = self._objects.get(check_key(key))
        if value is None:
            return None
        data, _ = value
        is_accepted = accept_size is None or accept_size(len(data))
        return data if is_accepted else NotAccepted(len(data))

    async def get_range(self, key: str, start: int, length: int) -> Buffer | None:
        check_range(start, length)
        value = self._objects.get(check_key(key))
        return None if value is None else value[0][start : start + length]

    async def head(self, key: str) -> ObjectInfo | None:
        value = self._objects.get(check_key(key))
        return None if value is None else ObjectInfo(key, len(value[0]), value[1])

    async def put(
        self,
        key: str,
        data: Buffer,
        *,
        mode: PutMode = "overwrite",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        if check_key(key) in self._objects and mode == "create":
            raise PreconditionError("exists already", op="put", store=self._url, key=key)
        self._objects[key] = (bytes(data), time.time())

    async def delete(self, key: str) -> None:
        self._objects.pop(check_key(key), None)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        for key, (data, modified) in tuple(self._objects.items()):
            if key.startswith(prefix):
                yield ObjectInfo(key, len(data), modified)

    async def atomic_create(self) -> bool:
        return True

    async def connect(self) -> None:
        pass

    def written_as(self, note: bytes) -> MemoryStore:
        return self

    async def aclose(self) -> None:
        """Keep the objects: a closed store may be looked at, and there is nothing to release."""


class FileStore:
    """A :class:`~s3cache.store.Store` of files below ``root``, laid out as ObjectFiles does.

    On NFS, EFS or Lustre it is a shared remote: it is safe for any number of processes on any
    number of machines that see the same file system. ``put`` has reached the disk when it returns.
    Nothing here blocks the event loop: file system calls run on other threads. One that hangs (a
    dead NFS server) fails as a :class:`~s3cache.errors.TransientError` after 15 s, and those after
    it at once, until the file system answers again.

    Raises:
        ConfigError: ``root`` is not a private directory of this user.
        StoreError: ``root`` cannot be created, or its file system hangs.
    """

    def __init__(self, root: str | os.PathLike[str], *, create: bool = True) -> None:
        self._executor = DeadlineExecutor.of(os.path.abspath(os.fspath(root)))
        self._is_closed = False

        def open_files() -> ObjectFiles:
            files = ObjectFiles(root, create=create)
            with contextlib.suppress(ReadOnlyError):  # it can be read all the same
                files.sweep()
            return files

        try:
            self._files = self._executor.call(open_files)
        except BaseException:
            self._executor.release()
            raise

    def __repr__(self) -> str:
        return f"FileStore({self.url!r})"

    @property
    def url(self) -> str:
        return self._files.url

    @overload
    async def get(self, key: str) -> bytes | None: ...
    @overload
    async def get(self, key: str, accept_size: AcceptSize | None) -> bytes | NotAccepted | None: ...
    async def get(
        self, key: str, accept_size: AcceptSize | None = None
    ) -> bytes | NotAccepted | None:
        if accept_size is None:
            return await self._call(lambda: self._files.read(key))
        accepted = 0
        while True:  # once more where a larger one takes the object's place meanwhile
            answer = await self._call(partial(self._files.read_if, key, accepted), size=accepted)
            if not isinstance(answer, NotAccepted) or not accept_size(answer.size):
                return answer
            accepted = answer.size

    async def get_range(self, key: str, start: int, length: int) -> bytes | None:
        return await self._call(lambda: self._files.read(key, start, length), size=length)

    async def head(self, key: str) -> ObjectInfo | None:
        return await self._call(lambda: self._files.stat(key))

    async def put(
        self,
        key: str,
        data: Buffer,
        *,
        mode: PutMode = "overwrite",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        write = self._files.create if mode == "create" else self._files.write
        await self._call(lambda: write(key, data), size=memoryview(data).nbytes)

    async def delete(self, key: str) -> None:
        await self._call(lambda: self._files.delete(key))

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        for info in await self._call(lambda: list(self._files.walk(prefix))):
            yield info

    async def atomic_create(self) -> bool:
        return True

    async def connect(self) -> None:
        pass

    def written_as(self, note: bytes) -> FileStore:
        return self

    async def aclose(self) -> None:
        """End idle threads; nothing else is held open."""
        if not self._is_closed:
            self._is_closed = True
            self._executor.release()

    async def _call(self, work: Callable[[], _T], *, size: int = 0) -> _T:
        """Return what ``work`` does on another thread, within the store's time limit."""
        more_s = (_TIMES_AS_LONG - 1) * self._executor.limit_s
        more_s += min(size / _BYTES_A_SECOND, _MAX_TRANSFER_S)
        return await asyncio.to_thread(self._executor.call, work, more_s=more_s)
