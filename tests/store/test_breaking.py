"""The circuit breaker: when it opens, what it lets through, when it closes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from s3cache.errors import (
    CircuitOpenError,
    ConfigError,
    PermanentError,
    PreconditionError,
    TransientError,
)
from s3cache.store import BreakerPolicy, BreakingStore, MemoryStore, RetryingStore, RetryPolicy
from s3cache.testing import FaultyStore
from s3cache.testing.contract import VERBS, listed

if TYPE_CHECKING:
    from tests.support.clock import FakeClock

POLICY = BreakerPolicy(failures=3, reset_after_s=10)


@pytest.fixture
def faulty() -> FaultyStore:
    return FaultyStore(MemoryStore())


@pytest.fixture
def breaking(faulty: FaultyStore, clock: FakeClock) -> BreakingStore:
    return BreakingStore(faulty, POLICY, clock=clock)


async def fail(breaking: BreakingStore, faulty: FaultyStore, times: int = 1) -> None:
    for _ in range(times):
        faulty.inject("head", "error")
        with pytest.raises(TransientError, match="injected"):
            await breaking.head("key")


async def test_opens_after_failures_in_a_row(breaking: BreakingStore, faulty: FaultyStore) -> None:
    await fail(breaking, faulty, 2)
    assert breaking.state == "closed"
    await fail(breaking, faulty)
    assert breaking.state == "open"


@pytest.mark.parametrize("verb", VERBS)
async def test_open_it_asks_nobody(
    breaking: BreakingStore, faulty: FaultyStore, clock: FakeClock, verb: str
) -> None:
    await fail(breaking, faulty, 3)
    clock.advance(9.9)
    for name in ("get", "get_range", "head", "put", "delete"):
        faulty.inject(name, "error")
    with pytest.raises(CircuitOpenError, match="3 failures in a row"):
        await VERBS[verb](breaking, "key")
    assert faulty.pending() == 5


async def test_open_it_lists_nothing(breaking: BreakingStore, faulty: FaultyStore) -> None:
    await fail(breaking, faulty, 3)
    with pytest.raises(CircuitOpenError):
        await listed(breaking)
    with pytest.raises(CircuitOpenError):
        await breaking.atomic_create()


async def test_a_success_between_failures_starts_the_count_again(
    breaking: BreakingStore, faulty: FaultyStore
) -> None:
    await fail(breaking, faulty, 2)
    assert await breaking.get("absent") is None
    await fail(breaking, faulty, 2)
    assert breaking.state == "closed"


async def test_every_answer_is_a_success(breaking: BreakingStore, faulty: FaultyStore) -> None:
    """Denied, exists already, not there: the server is up."""
    await breaking.put("key", b"x")
    await fail(breaking, faulty, 2)
    faulty.inject("get", "permanent")
    with pytest.raises(PermanentError):
        await breaking.get("key")
    await fail(breaking, faulty, 2)
    with pytest.raises(PreconditionError):
        await breaking.put("key", b"x", mode="create")
    await fail(breaking, faulty, 2)
    assert breaking.state == "closed"


async def test_a_refused_key_is_no_answer(breaking: BreakingStore, faulty: FaultyStore) -> None:
    """The server was never asked: neither a success nor a failure."""
    await fail(breaking, faulty, 2)
    with pytest.raises(ConfigError):
        await breaking.get("../x")
    await fail(breaking, faulty)
    assert breaking.state == "open"


async def test_half_open_exactly_one_probe_passes(
    breaking: BreakingStore, faulty: FaultyStore, clock: FakeClock
) -> None:
    await fail(breaking, faulty, 3)
    clock.advance(10)
    assert breaking.state == "half-open"
    faulty.inject("get", "slow")
    results = await asyncio.gather(*(breaking.get("key") for _ in range(5)), return_exceptions=True)
    assert results[0] is None
    assert [type(error) for error in results[1:]] == [CircuitOpenError] * 4
    assert breaking.state == "closed"
    assert await breaking.get("key") is None


async def test_a_failed_probe_opens_it_for_as_long_again(
    breaking: BreakingStore, faulty: FaultyStore, clock: FakeClock
) -> None:
    await fail(breaking, faulty, 3)
    clock.advance(10)
    await fail(breaking, faulty)
    assert breaking.state == "open"
    clock.advance(9.9)
    with pytest.raises(CircuitOpenError):
        await breaking.get("key")
    clock.advance(0.2)
    assert await breaking.get("key") is None
    assert breaking.state == "closed"


async def test_once_closed_it_takes_all_failures_again_to_open(
    breaking: BreakingStore, faulty: FaultyStore, clock: FakeClock
) -> None:
    await fail(breaking, faulty, 3)
    clock.advance(10)
    assert await breaking.get("key") is None
    await fail(breaking, faulty, 2)
    assert breaking.state == "closed"


async def test_a_probe_answered_with_a_permanent_error_closes_it(
    breaking: BreakingStore, faulty: FaultyStore, clock: FakeClock
) -> None:
    await fail(breaking, faulty, 3)
    clock.advance(10)
    faulty.inject("get", "permanent")
    with pytest.raises(PermanentError):
        await breaking.get("key")
    assert breaking.state == "closed"


async def test_a_cancelled_probe_lets_the_next_call_probe(
    breaking: BreakingStore, faulty: FaultyStore, clock: FakeClock
) -> None:
    await fail(breaking, faulty, 3)
    clock.advance(10)
    faulty.inject("get", "hang")
    probe = asyncio.ensure_future(breaking.get("key"))
    await asyncio.sleep(0)
    with pytest.raises(CircuitOpenError, match="a probe is under way"):
        await breaking.get("key")
    probe.cancel()
    await asyncio.gather(probe, return_exceptions=True)
    assert breaking.state == "half-open"
    assert await breaking.get("key") is None
    assert breaking.state == "closed"


async def test_a_probe_with_an_illegal_key_lets_the_next_call_probe(
    breaking: BreakingStore, faulty: FaultyStore, clock: FakeClock
) -> None:
    await fail(breaking, faulty, 3)
    clock.advance(10)
    with pytest.raises(ConfigError):
        await breaking.get("../x")
    assert breaking.state == "half-open"
    assert await breaking.get("key") is None


async def test_a_listing_may_be_the_probe_and_may_be_left(
    breaking: BreakingStore, faulty: FaultyStore, clock: FakeClock
) -> None:
    await breaking.put("a", b"")
    await breaking.put("b", b"")
    await fail(breaking, faulty, 3)
    clock.advance(10)
    async for _ in breaking.list():
        break
    assert breaking.state == "closed"


async def test_late_news_from_before_it_opened_changes_nothing(
    breaking: BreakingStore, faulty: FaultyStore, clock: FakeClock
) -> None:
    faulty.inject("get", "slow")
    early = asyncio.ensure_future(breaking.get("key"))
    await asyncio.sleep(0)
    await fail(breaking, faulty, 3)
    assert await early is None
    assert breaking.state == "open"


async def test_around_retries_a_hanging_server_opens_it(
    faulty: FaultyStore, clock: FakeClock
) -> None:
    """Time-outs are cancellations inside the retries and errors outside of them."""
    retries = RetryPolicy(
        attempts=2, total_timeout_s=0.02, attempt_timeout_s=0.01, base_delay_s=0.0, max_delay_s=0.0
    )
    breaking = BreakingStore(RetryingStore(faulty, retries), POLICY, clock=clock)
    faulty.inject("get", "hang", times=99)
    for _ in range(3):
        with pytest.raises(TransientError, match="no answer"):
            await breaking.get("key")
    assert breaking.state == "open"


@pytest.mark.parametrize(("failures", "reset_after_s"), [(0, 1), (1, -1), (1, float("nan"))])
def test_a_senseless_policy_is_refused(failures: int, reset_after_s: float) -> None:
    with pytest.raises(ConfigError):
        BreakerPolicy(failures, reset_after_s)
