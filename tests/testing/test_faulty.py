"""The store that fails on purpose does so on order, and the same way again."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from s3cache.errors import ConfigError, PermanentError, StoreError, TransientError
from s3cache.store import MemoryStore
from s3cache.testing import FaultyStore

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from s3cache.testing import Fault

DATA = bytes(range(256))


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def faulty(memory: MemoryStore) -> FaultyStore:
    return FaultyStore(memory)


async def history(seed: int) -> list[object]:
    """What 200 calls at mixed rates came to."""
    rates: dict[Fault, float] = {"error": 0.2, "slow": 0.1, "bit_flip": 0.1, "truncate": 0.1}
    store = FaultyStore(MemoryStore(), rates, seed=seed, slow_s=0.0)
    outcomes: list[object] = []
    for i in range(100):
        calls: list[Awaitable[object]] = [store.put(f"k{i % 5}", DATA), store.get(f"k{i % 5}")]
        for call in calls:
            (outcome,) = await asyncio.gather(call, return_exceptions=True)
            outcomes.append(repr(outcome))
    return [*outcomes, store.counts]


async def test_a_seed_repeats_itself_and_another_differs() -> None:
    assert await history(1) == await history(1)
    assert await history(1) != await history(2)


async def test_orders_are_met_in_turn_then_all_is_well(faulty: FaultyStore) -> None:
    faulty.inject("get", "error", times=2)
    faulty.inject("get", "permanent")
    faulty.inject("head", "error")
    for expected in (TransientError, TransientError, PermanentError):
        with pytest.raises(expected):
            await faulty.get("key")
    assert await faulty.get("key") is None
    assert faulty.pending() == 1
    assert faulty.counts == {("get", "error"): 2, ("get", "permanent"): 1}
    faulty.inject("put", "hang")
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(faulty.put("key", b"x"), 0.02)
    assert await faulty.get("key") is None


@pytest.mark.parametrize(
    ("fault", "is_done"), [("error", False), ("permanent", False), ("fail_after_commit", True)]
)
async def test_an_error_comes_before_anything_is_done_or_after_all(
    faulty: FaultyStore, memory: MemoryStore, fault: Fault, is_done: bool
) -> None:
    await memory.put("key", b"old")
    for verb in ("put", "delete"):
        faulty.inject(verb, fault)
    with pytest.raises(StoreError, match="injected"):
        await faulty.put("key", b"new")
    assert await memory.get("key") == (b"new" if is_done else b"old")
    with pytest.raises(StoreError, match="injected"):
        await faulty.delete("key")
    assert (await memory.get("key") is None) == is_done


async def test_damage_is_done_to_what_is_read_and_not_to_the_object(
    faulty: FaultyStore, memory: MemoryStore
) -> None:
    """A proper prefix, another one each time; or one bit."""
    await memory.put("key", DATA)
    faulty.inject("get", "truncate", times=20)
    found = [await faulty.get("key") for _ in range(20)]
    assert all(got is not None and DATA.startswith(got) and got != DATA for got in found)
    assert len({*found}) > 5
    faulty.inject("get_range", "bit_flip")
    got = await faulty.get_range("key", 10, 50)
    assert got is not None
    assert sum((a ^ b).bit_count() for a, b in zip(got, DATA[10:60], strict=True)) == 1
    assert await faulty.get("key") == DATA
    faulty.inject("get", "truncate")
    assert await faulty.get("absent") is None


def test_a_fault_that_makes_no_sense_is_refused(faulty: FaultyStore) -> None:
    with pytest.raises(ConfigError, match="does not apply"):
        faulty.inject("put", "truncate")
