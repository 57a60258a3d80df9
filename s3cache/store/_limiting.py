"""A bound on how many calls a store has to serve at once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from s3cache.errors import ConfigError
from s3cache.store._base import Buffer, ObjectInfo, PutMode, Store
from s3cache.store._wrapper import WrapperStore, listing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

__all__ = ["LimitingStore"]


class LimitingStore(WrapperStore):
    """At most ``max_concurrent`` calls run in ``inner``; others wait their turn, first come first.

    A listing takes part only while it fetches, never while its consumer holds an item: a loop
    that reads each object it lists gets on with a limit of 1.

    Raises:
        ConfigError: ``max_concurrent`` is less than 1.
    """

    def __init__(self, inner: Store, max_concurrent: int) -> None:
        super().__init__(inner)
        if max_concurrent < 1:
            raise ConfigError(
                f"max_concurrent={max_concurrent}", "is less than 1", "give 1 or more"
            )
        self._slots = asyncio.Semaphore(max_concurrent)

    async def get(self, key: str) -> Buffer | None:
        async with self._slots:
            return await self.inner.get(key)

    async def get_range(self, key: str, start: int, length: int) -> Buffer | None:
        async with self._slots:
            return await self.inner.get_range(key, start, length)

    async def head(self, key: str) -> ObjectInfo | None:
        async with self._slots:
            return await self.inner.head(key)

    async def put(
        self,
        key: str,
        data: Buffer,
        *,
        mode: PutMode = "overwrite",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        async with self._slots:
            await self.inner.put(key, data, mode=mode, metadata=metadata)

    async def delete(self, key: str) -> None:
        async with self._slots:
            await self.inner.delete(key)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        async with listing(self.inner, prefix) as items:
            while True:
                async with self._slots:
                    info = await anext(items, None)
                if info is None:
                    return
                yield info

    async def atomic_create(self) -> bool:
        async with self._slots:
            return await self.inner.atomic_create()
