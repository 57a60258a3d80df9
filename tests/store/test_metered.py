"""The counts of the meter."""

from __future__ import annotations

import array
from typing import Any

import pytest

from s3cache.errors import PreconditionError, TransientError
from s3cache.store import AcceptSize, MemoryStore, MeteredStore, WrapperStore
from tests.support.clock import FakeClock
from tests.support.faulty import FaultyStore


class Slow(WrapperStore):
    """A store where a get takes 2 s of the fake clock, and a page of a listing 3 s."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(MemoryStore())
        self.clock = clock

    async def get(self, key: str, admit: AcceptSize | None = None) -> Any:
        self.clock.advance(2)
        return await self.inner.get(key, admit)

    async def list_page(self, prefix: str, after: str | None = None) -> Any:
        self.clock.advance(3)
        return await self.inner.list_page(prefix, after)


async def test_calls_and_bytes_are_counted_by_verb() -> None:
    store = MeteredStore(MemoryStore())
    await store.put("key", b"12345")
    await store.put("key2", memoryview(array.array("I", [1, 2])))
    await store.get("key")
    await store.get("absent")
    await store.get_range("key", 1, 2)
    await store.head("key")
    await store.delete("key2")
    await store.atomic_create()
    stats = store.snapshot()
    assert {verb: s.calls for verb, s in stats.items()} == {
        "get": 2, "get_range": 1, "head": 1, "put": 2, "delete": 1, "list": 0, "atomic_create": 1,
    }  # fmt: skip
    assert (stats["put"].bytes_out, stats["put"].bytes_in) == (13, 0)
    assert (stats["get"].bytes_out, stats["get"].bytes_in) == (0, 5)
    assert stats["get_range"].bytes_in == 2
    assert all(s.latency.count == s.calls for s in stats.values())


async def test_errors_are_counted_by_class_and_without_bytes() -> None:
    faulty = FaultyStore(MemoryStore())
    store = MeteredStore(faulty)
    await store.put("key", b"x")
    with pytest.raises(PreconditionError):
        await store.put("key", b"yy", mode="create")
    faulty.inject("put", "error", times=2)
    for _ in range(2):
        with pytest.raises(TransientError):
            await store.put("key", b"zzz")
    put = store.snapshot()["put"]
    assert put.calls == 4
    assert put.errors == {"PreconditionError": 1, "TransientError": 2}
    assert put.bytes_out == 1


async def test_a_page_of_a_listing_is_one_call_without_the_consumers_time(clock: FakeClock) -> None:
    store = MeteredStore(Slow(clock), clock=clock)
    for key in ("a", "b", "c"):
        await store.put(key, b"")
    async for _ in store.list():
        clock.advance(100)
    stats = store.snapshot()["list"]
    assert (stats.calls, stats.latency.total_s, stats.errors) == (1, 3.0, {})
    await store.get("a")
    await store.get("a")
    latency = store.snapshot()["get"].latency
    assert (latency.count, latency.total_s, latency.max_s) == (2, 4.0, 2.0)
