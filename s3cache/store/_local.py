"""A local directory as a store; on NFS, EFS or Lustre the same code is a shared remote."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping

from s3cache.errors import ReadOnlyError
from s3cache.store._base import Buffer, ObjectInfo, PutMode
from s3cache.store._directory import Directory

__all__ = ["LocalStore"]


class LocalStore:
    """One file an object below ``root``; see :mod:`s3cache.store._directory` for the layout.

    Safe for any number of processes on any number of machines that see the same file system.
    ``put`` has reached the disk when it returns. Nothing here blocks the event loop: file system
    calls run on the loop's executor.

    Raises:
        ConfigError: ``root`` is not a private directory of this user.
        StoreError: ``root`` cannot be created.
    """

    def __init__(self, root: str | os.PathLike[str], *, create: bool = True) -> None:
        self._directory = Directory(root, create=create)
        with contextlib.suppress(ReadOnlyError):  # it can be read all the same
            self._directory.sweep()

    @property
    def url(self) -> str:
        return self._directory.url

    async def get(self, key: str) -> bytes | None:
        return await asyncio.to_thread(self._directory.read, key)

    async def get_range(self, key: str, start: int, length: int) -> bytes | None:
        return await asyncio.to_thread(self._directory.read, key, start, length)

    async def head(self, key: str) -> ObjectInfo | None:
        return await asyncio.to_thread(self._directory.stat, key)

    async def put(
        self,
        key: str,
        data: Buffer,
        *,
        mode: PutMode = "overwrite",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        write = self._directory.create if mode == "create" else self._directory.write
        await asyncio.to_thread(write, key, data)

    async def delete(self, key: str) -> None:
        await asyncio.to_thread(self._directory.delete, key)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        for info in await asyncio.to_thread(lambda: list(self._directory.walk(prefix))):
            yield info

    async def atomic_create(self) -> bool:
        return True

    async def aclose(self) -> None:
        """Nothing is held open."""
