"""The store that fails on purpose does so on order, and the same way again."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from s3cache.errors import ConfigError, PermanentError, StoreError, TransientError
from s3cache.store import MemoryStore
from s3cache.testing import FaultRates, FaultyStore

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from s3cache.testing import Fault, FaultyVerb

DATA = bytes(range(256))


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def faulty(memory: MemoryStore) -> FaultyStore:
    return FaultyStore(memory)


async def history(seed: int) -> list[object]:
    """What 200 calls at mixed rates came to."""
    rates = FaultRates(
        error=0.1, permanent=0.1, slow=0.1, truncate=0.1, bit_flip=0.1, fail_after_commit=0.1
    )
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


async def test_injecting_does_not_shift_the_chances_of_later_calls() -> None:
    async def failed(injected: bool) -> list[bool]:
        store = FaultyStore(MemoryStore(), FaultRates(error=0.5), seed=9)
        if injected:
            store.inject("get", "permanent")
        results = [await asyncio.gather(store.get("k"), return_exceptions=True) for _ in range(50)]
        return [result != [None] for result in results][1:]

    assert await failed(True) == await failed(False)


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


async def test_truncate_gives_a_proper_prefix_and_leaves_the_object(
    faulty: FaultyStore, memory: MemoryStore
) -> None:
    await memory.put("key", DATA)
    faulty.inject("get", "truncate", times=20)
    found = [await faulty.get("key") for _ in range(20)]
    assert all(got is not None and DATA.startswith(got) and got != DATA for got in found)
    assert len({*found}) > 5
    assert await faulty.get("key") == DATA
    await memory.put("empty", b"")
    faulty.inject("get", "truncate", times=2)
    assert await faulty.get("absent") is None
    assert await faulty.get("empty") == b""
    assert faulty.counts == {("get", "truncate"): 20}


async def test_bit_flip_flips_one_bit_and_leaves_the_object(
    faulty: FaultyStore, memory: MemoryStore
) -> None:
    await memory.put("key", DATA)
    faulty.inject("get", "bit_flip")
    faulty.inject("get_range", "bit_flip")
    for got, whole in (
        (await faulty.get("key"), DATA),
        (await faulty.get_range("key", 10, 50), DATA[10:60]),
    ):
        assert got is not None
        assert sum((a ^ b).bit_count() for a, b in zip(got, whole, strict=True)) == 1
    assert await faulty.get("key") == DATA


async def test_hang_ends_only_with_cancellation(faulty: FaultyStore, memory: MemoryStore) -> None:
    faulty.inject("put", "hang")
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(faulty.put("key", b"x"), 0.02)
    assert await memory.get("key") is None
    assert faulty.counts == {("put", "hang"): 1}


@pytest.mark.parametrize(
    ("verb", "fault"), [("put", "truncate"), ("get", "fail_after_commit"), ("head", "bit_flip")]
)
def test_a_fault_that_makes_no_sense_is_refused(
    faulty: FaultyStore, verb: FaultyVerb, fault: Fault
) -> None:
    with pytest.raises(ConfigError, match="does not apply"):
        faulty.inject(verb, fault)


def test_rates_that_are_no_distribution_are_refused() -> None:
    with pytest.raises(ConfigError):
        FaultRates(error=-0.1)
    with pytest.raises(ConfigError):
        FaultRates(error=0.7, hang=0.4)
