"""Small wrappers: a bound on calls at once, no writes, and the latency of a network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import NoReturn, TypeVar

from s3cache.errors import ConfigError, ReadOnlyError
from s3cache.stats import Verb
from s3cache.store._base import (
    Buffer,
    ObjectInfo,
    PutMode,
    Store,
    WrapperStore,
    check_key,
    listing,
)

__all__ = ["LatencyStore", "LimitingStore", "ReadOnlyStore"]

_T = TypeVar("_T")

# What S3 returns for one ListObjectsV2 request.
_PAGE_OBJECTS = 1_000


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

    async def _around(self, verb: Verb, key: str, call: Callable[[], Awaitable[_T]]) -> _T:
        async with self._slots:
            return await call()


class ReadOnlyStore(WrapperStore):
    """Raises :class:`~s3cache.errors.ReadOnlyError` from ``put`` and ``delete``; reads pass.

    This protects against mistakes, not against code in the same process. Readers that are not
    trusted need credentials that cannot write.
    """

    async def put(
        self,
        key: str,
        data: Buffer,
        *,
        mode: PutMode = "overwrite",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self._refuse("put", key)

    async def delete(self, key: str) -> None:
        self._refuse("delete", key)

    async def atomic_create(self) -> bool:
        """Return ``False``: creation is refused here, and a store may have to write to find out."""
        return False

    def _refuse(self, op: str, key: str) -> NoReturn:
        raise ReadOnlyError("opened read-only", op=op, store=self.url, key=check_key(key))


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
