"""A store as slow as a network: for tests and benchmarks."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from s3cache.store._base import Buffer, ObjectInfo, PutMode, Store
from s3cache.store._wrapper import WrapperStore, listing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

__all__ = ["LatencyStore"]

# What S3 returns for one ListObjectsV2 request.
_PAGE_OBJECTS = 1_000


class LatencyStore(WrapperStore):
    """Each call takes ``latency_s`` longer, and ``1 / bytes_per_s`` more for each byte it moves.

    Calls do not share the bandwidth: it is one connection's, as S3 gives it. A listing pays
    ``latency_s`` for every 1,000 objects.
    """

    def __init__(self, inner: Store, latency_s: float, bytes_per_s: float | None = None) -> None:
        super().__init__(inner)
        self._latency_s = latency_s
        self._s_per_byte = 0.0 if bytes_per_s is None else 1.0 / bytes_per_s

    async def get(self, key: str) -> Buffer | None:
        return await self._received(await self.inner.get(key))

    async def get_range(self, key: str, start: int, length: int) -> Buffer | None:
        return await self._received(await self.inner.get_range(key, start, length))

    async def head(self, key: str) -> ObjectInfo | None:
        await asyncio.sleep(self._latency_s)
        return await self.inner.head(key)

    async def put(
        self,
        key: str,
        data: Buffer,
        *,
        mode: PutMode = "overwrite",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        await asyncio.sleep(self._latency_s + memoryview(data).nbytes * self._s_per_byte)
        await self.inner.put(key, data, mode=mode, metadata=metadata)

    async def delete(self, key: str) -> None:
        await asyncio.sleep(self._latency_s)
        await self.inner.delete(key)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        await asyncio.sleep(self._latency_s)
        listed = 0
        async with listing(self.inner, prefix) as items:
            async for info in items:
                if listed and listed % _PAGE_OBJECTS == 0:
                    await asyncio.sleep(self._latency_s)
                listed += 1
                yield info

    async def _received(self, data: Buffer | None) -> Buffer | None:
        size = 0 if data is None else memoryview(data).nbytes
        await asyncio.sleep(self._latency_s + size * self._s_per_byte)
        return data
