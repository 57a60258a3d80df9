"""The circuit breaker: when it opens, which calls pass it, and when it closes."""

from __future__ import annotations

import asyncio

import pytest

from s3cache.errors import (
    CircuitOpenError,
    ConfigError,
    PermanentError,
    PreconditionError,
    TransientError,
)
from s3cache.store import BreakingStore
from s3cache.util.threads import Breaker
from tests.support.clock import FakeClock
from tests.support.contract import VERBS, listed
from tests.support.faulty import FaultyStore


@pytest.fixture
def breaking(faulty: FaultyStore, clock: FakeClock) -> BreakingStore:
    return BreakingStore(faulty, Breaker(3, 10, clock=clock))


@pytest.fixture
async def half_open(
    breaking: BreakingStore, faulty: FaultyStore, clock: FakeClock
) -> BreakingStore:
    await breaking.put("there", b"")
    await fail(breaking, faulty, 3)
    clock.advance(10)
    assert breaking.breaker.state == "half-open"
    return breaking


async def fail(breaking: BreakingStore, faulty: FaultyStore, times: int = 1) -> None:
    for _ in range(times):
        faulty.inject("head", "error")
        with pytest.raises(TransientError, match="injected"):
            await breaking.head("key")


async def test_it_opens_after_failures_in_a_row_and_passes_no_call(
    breaking: BreakingStore, faulty: FaultyStore, clock: FakeClock
) -> None:
    await fail(breaking, faulty, 2)
    assert breaking.breaker.state == "closed"
    await fail(breaking, faulty)
    assert breaking.breaker.state == "open"
    clock.advance(9.9)
    for call in VERBS.values():
        with pytest.raises(CircuitOpenError, match="3 failures in a row"):
            await call(breaking, "key")
    with pytest.raises(CircuitOpenError):
        await listed(breaking)


async def test_every_answer_of_the_server_counts_as_a_success(
    breaking: BreakingStore, faulty: FaultyStore
) -> None:
    """A refusal, a present object or an absent object shows that the server is up."""
    await breaking.put("key", b"x")
    await fail(breaking, faulty, 2)
    faulty.inject("get", "permanent")
    with pytest.raises(PermanentError):
        await breaking.get("key")
    await fail(breaking, faulty, 2)
    with pytest.raises(PreconditionError):
        await breaking.put("key", b"x", mode="create")
    await fail(breaking, faulty, 2)
    assert await breaking.get("absent") is None
    await fail(breaking, faulty, 2)
    assert breaking.breaker.state == "closed"


async def test_a_half_open_breaker_passes_exactly_one_probe(
    half_open: BreakingStore, faulty: FaultyStore, clock: FakeClock
) -> None:
    """A failed probe opens it for as long again. Once closed, it counts failures from zero."""
    await fail(half_open, faulty)
    assert half_open.breaker.state == "open"
    clock.advance(10)
    faulty.inject("get", "slow")
    results = await asyncio.gather(
        *(half_open.get("key") for _ in range(5)), return_exceptions=True
    )
    assert results[0] is None
    assert [type(error) for error in results[1:]] == [CircuitOpenError] * 4
    await fail(half_open, faulty, 2)
    assert half_open.breaker.state == "closed"
    assert await half_open.get("key") is None


async def test_a_cancelled_or_illegal_probe_lets_the_next_call_probe(
    half_open: BreakingStore, faulty: FaultyStore
) -> None:
    faulty.inject("get", "hang")
    probe = asyncio.ensure_future(half_open.get("key"))
    await asyncio.sleep(0)
    with pytest.raises(CircuitOpenError, match="a probe is under way"):
        await half_open.get("key")
    probe.cancel()
    await asyncio.gather(probe, return_exceptions=True)
    with pytest.raises(ConfigError):
        await half_open.get("../x")
    assert half_open.breaker.state == "half-open"
    assert await half_open.get("key") is None
    assert half_open.breaker.state == "closed"
