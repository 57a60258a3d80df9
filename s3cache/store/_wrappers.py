"""Wrappers that measure calls, and that add the latency of a network."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar, get_args

from s3cache.stats import Meter, Verb, VerbStats
from s3cache.store._base import Buffer, ObjectInfo, PutMode, Store, WrapperStore, listing

__all__ = ["LatencyStore", "MeteredStore"]

_T = TypeVar("_T")

# What S3 returns for one ListObjectsV2 request.
_PAGE_OBJECTS = 1_000


class MeteredStore(WrapperStore):
    """Measures each call to ``inner``; what it measures depends on where in a stack it stands.

    Inside :class:`RetryingStore` it sees every attempt, outside only the outcome.
    """

    def __init__(self, inner: Store, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(inner)
        self._clock = clock
        self._meters: dict[Verb, Meter] = {verb: Meter() for verb in get_args(Verb)}

    def snapshot(self) -> Mapping[Verb, VerbStats]:
        """Return every verb's statistics so far; may be called from any thread."""
        return MappingProxyType({verb: meter.snapshot() for verb, meter in self._meters.items()})

    async def _around(self, verb: Verb, key: str, call: Callable[[], Awaitable[_T]]) -> _T:
        with self._recorded(verb) as measured:
            with self._timed(measured):
                answer = await call()
            if verb in ("get", "get_range"):
                measured.bytes_in = _size(answer)
        return answer

    async def put(
        self,
        key: str,
        data: Buffer,
        *,
        mode: PutMode = "overwrite",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        await super().put(key, data, mode=mode, metadata=metadata)
        self._meters["put"].add_bytes_out(_size(data))

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        with self._recorded("list") as measured:
            async with listing(self.inner, prefix) as items:
                while True:
                    with self._timed(measured):
                        info = await anext(items, None)
                    if info is None:
                        return
                    yield info

    @contextmanager
    def _recorded(self, verb: Verb) -> Iterator[_Call]:
        measured = _Call()
        try:
            yield measured
        finally:
            self._meters[verb].record(measured.elapsed_s, measured.bytes_in, measured.error)

    @contextmanager
    def _timed(self, measured: _Call) -> Iterator[None]:
        started = self._clock()
        try:
            yield
        except BaseException as error:
            measured.error = type(error).__name__
            raise
        finally:
            measured.elapsed_s += self._clock() - started


@dataclass(slots=True)
class _Call:
    elapsed_s: float = 0.0
    bytes_in: int = 0
    error: str | None = None


def _size(answer: object) -> int:
    return memoryview(answer).nbytes if isinstance(answer, bytes | bytearray | memoryview) else 0


class LatencyStore(WrapperStore):
    """Makes each call take ``latency_s`` longer, and ``1 / bytes_per_s`` more per byte it moves.

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
        await asyncio.sleep(_size(answer) * self._s_per_byte)
        return answer

    async def put(
        self,
        key: str,
        data: Buffer,
        *,
        mode: PutMode = "overwrite",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        await asyncio.sleep(_size(data) * self._s_per_byte)
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
