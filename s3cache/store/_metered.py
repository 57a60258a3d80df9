"""Counts of what a store was asked, what it moved and how long it took."""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from s3cache.metrics import Histogram, HistogramSnapshot
from s3cache.store._base import Buffer, ObjectInfo, PutMode, Store
from s3cache.store._wrapper import WrapperStore, listing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping

__all__ = ["MeteredStore", "Verb", "VerbStats"]

Verb: TypeAlias = Literal["get", "get_range", "head", "put", "delete", "list", "atomic_create"]


@dataclass(frozen=True, slots=True)
class VerbStats:
    """One verb of a store, as it stood at one moment.

    Attributes:
        calls: calls that ended, well or not. A listing is one call, however long.
        errors: how many of them raised, by the error's class name; ``CancelledError`` too.
        bytes_in: bytes that came from the store.
        bytes_out: bytes that were written to it.
        latency: seconds spent waiting for the store; for a listing, without its consumer's time.
    """

    calls: int = 0
    errors: Mapping[str, int] = field(default_factory=dict)
    bytes_in: int = 0
    bytes_out: int = 0
    latency: HistogramSnapshot = field(default_factory=HistogramSnapshot)


class MeteredStore(WrapperStore):
    """Measures each call to ``inner``; what it measures depends on where in a stack it stands.

    Inside :class:`~s3cache.store.RetryingStore` it sees every attempt, outside only the outcome.
    """

    def __init__(self, inner: Store, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(inner)
        self._clock = clock
        self._meters: dict[Verb, _Meter] = {verb: _Meter() for verb in get_args(Verb)}

    def snapshot(self) -> Mapping[Verb, VerbStats]:
        """Every verb's statistics so far; may be called from any thread."""
        return MappingProxyType({verb: meter.snapshot() for verb, meter in self._meters.items()})

    async def get(self, key: str) -> Buffer | None:
        with self._measure("get") as call:
            data = await self.inner.get(key)
            call.bytes_in = _size(data)
            return data

    async def get_range(self, key: str, start: int, length: int) -> Buffer | None:
        with self._measure("get_range") as call:
            data = await self.inner.get_range(key, start, length)
            call.bytes_in = _size(data)
            return data

    async def head(self, key: str) -> ObjectInfo | None:
        with self._measure("head"):
            return await self.inner.head(key)

    async def put(
        self,
        key: str,
        data: Buffer,
        *,
        mode: PutMode = "overwrite",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        with self._measure("put") as call:
            await self.inner.put(key, data, mode=mode, metadata=metadata)
            call.bytes_out = _size(data)

    async def delete(self, key: str) -> None:
        with self._measure("delete"):
            await self.inner.delete(key)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        call = _Call()
        try:
            async with listing(self.inner, prefix) as items:
                while True:
                    with self._timed(call):
                        info = await anext(items, None)
                    if info is None:
                        return
                    yield info
        finally:
            self._meters["list"].record(call)

    async def atomic_create(self) -> bool:
        with self._measure("atomic_create"):
            return await self.inner.atomic_create()

    @contextmanager
    def _measure(self, verb: Verb) -> Iterator[_Call]:
        call = _Call()
        try:
            with self._timed(call):
                yield call
        finally:
            self._meters[verb].record(call)

    @contextmanager
    def _timed(self, call: _Call) -> Iterator[None]:
        started = self._clock()
        try:
            yield
        except BaseException as error:
            call.error = type(error).__name__
            raise
        finally:
            call.elapsed_s += self._clock() - started


@dataclass(slots=True)
class _Call:
    elapsed_s: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    error: str | None = None


class _Meter:
    """One verb's running totals: written on the event loop, read from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls = 0
        self._errors: Counter[str] = Counter()
        self._bytes_in = 0
        self._bytes_out = 0
        self._latency = Histogram()

    def record(self, call: _Call) -> None:
        with self._lock:
            self._calls += 1
            self._bytes_in += call.bytes_in
            self._bytes_out += call.bytes_out
            self._latency.record(call.elapsed_s)
            if call.error is not None:
                self._errors[call.error] += 1

    def snapshot(self) -> VerbStats:
        with self._lock:
            return VerbStats(
                self._calls,
                MappingProxyType(dict(self._errors)),
                self._bytes_in,
                self._bytes_out,
                self._latency.snapshot(),
            )


def _size(data: Buffer | None) -> int:
    return 0 if data is None else memoryview(data).nbytes
