"""A store as slow as a network: for tests and benchmarks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TypeVar

from s3cache.stats import Verb
from s3cache.store._base import Buffer, ObjectInfo, PutMode, Store, WrapperStore, listing

__all__ = ["LatencyStore"]

_T = TypeVar("_T")

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

    async def _around(self, verb: Verb, key: str, call: Callable[[], Awaitable[_T]]) -> _T:
        await asyncio.sleep(self._latency_s)
        answer = await call()
        if isinstance(answer, bytes | bytearray | memoryview):
            await self._move(answer)
        return answer

    async def put(
        self,
        key: str,
        data: Buffer,
        *,
        mode: PutMode = "overwrite",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        await self._move(data)
        await super().put(key, data, mode=mode, metadata=metadata)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        await asyncio.sleep(self._latency_s)
        listed = 0
        async with listing(self.inner, prefix) as items:
            async for info in items:
                if listed and listed % _PAGE_OBJECTS == 0:
                    await asyncio.sleep(self._latency_s)
                listed += 1
                yield info

    async def atomic_create(self) -> bool:  # a store knows it after the first time
        return await self.inner.atomic_create()

    async def _move(self, data: Buffer) -> None:
        await asyncio.sleep(memoryview(data).nbytes * self._s_per_byte)
