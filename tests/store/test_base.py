"""Legal keys, and the wrappers: one method for all calls, retries, the breaker, counts."""

from __future__ import annotations

import array
import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, get_args

import pytest

from s3cache.errors import (
    AccessDeniedError,
    CircuitOpenError,
    ConfigError,
    PermanentError,
    PreconditionError,
    StoreError,
    TransientError,
)
from s3cache.stats import Verb
from s3cache.store import (
    BreakingStore,
    MemoryStore,
    MeteredStore,
    NotAccepted,
    RetryingStore,
    RetryPolicy,
    WrapperStore,
    check_key,
)
from s3cache.util.threads import Breaker
from tests.support.clock import FakeClock
from tests.support.contract import VERBS, listed
from tests.support.faulty import FaultyStore
from tests.support.stores import FailingStore

ILLEGAL_KEYS = {
    "empty": "",
    "leading slash": "/a",
    "trailing slash": "a/",
    "empty segment": "a//b",
    "dot": ".",
    "dots segment": "a/../b",
    "hidden": "a/.b",
    "newline at the end": "a\n",
    "nul": "a\0b",
    "space": "a b",
    "percent": "a%2fb",
    "plus": "a+b",
    "capital": "aB",
    "not ASCII": "é",
    "surrogate": "a\ud800",
    "long segment": "k" * 201,
    "too long": "/".join(["k" * 150] * 6),
}


@pytest.mark.parametrize("key", ILLEGAL_KEYS.values(), ids=ILLEGAL_KEYS.keys())
def test_no_store_accepts_an_illegal_key(key: str) -> None:
    """The contract tests try one illegal key on every store, with every verb."""
    with pytest.raises(ConfigError):
        check_key(key)


class Noting(WrapperStore):
    """A wrapper that notes each call, makes it twice, and returns the second answer."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self.calls: list[tuple[str, str]] = []

    async def _around(self, verb: Verb, key: str, call: Callable[[], Awaitable[Any]]) -> Any:
        self.calls.append((verb, key))
        await call()
        return await call()


async def test_the_wrapper_sees_every_verb_with_its_key() -> None:
    store = Noting(MemoryStore())
    await store.put("key", b"abc")
    assert await store.get("key") == b"abc"
    assert await store.get("key", lambda size: size > 3) == NotAccepted(3)
    assert await store.get_range("key", 1) == b"a"
    assert await store.head("key") is not None
    assert [*await listed(store, "k")] == ["key"]
    assert await store.atomic_create()
    await store.delete("key")
    verbs = ["put", "get", "get", "get_range", "head", "list", "atomic_create", "delete"]
    keys = {"list": "k", "atomic_create": ""}
    assert store.calls == [(verb, keys.get(verb, "key")) for verb in verbs]
    assert set(verbs) == set(get_args(Verb))


# -- retries

QUICK = RetryPolicy(
    attempts=4, total_timeout_s=30, attempt_timeout_s=30, base_delay_s=0.0, max_delay_s=0.0
)


@pytest.mark.parametrize("verb", ["get", "get_range", "head", "put", "delete", "list"])
async def test_a_transient_error_is_retried_and_logged(
    faulty: FaultyStore, verb: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The error of the last attempt has the number of attempts and the time they took."""
    faulty.inject(verb, "error", times=3 + 4)
    store, call = RetryingStore(faulty, QUICK), VERBS.get(verb, listed)
    with caplog.at_level("INFO", "s3cache.storage"):
        with pytest.raises(TransientError, match="gave up after 4 attempts") as caught:
            await call(store, "key")
        error = caught.value
        assert (type(error), error.attempts, error.elapsed_s > 0) == (TransientError, 4, True)
        assert (error.op, error.key) == (verb, "key")
        await call(store, "key")
    assert faulty.counts == {(verb, "error"): 7}
    assert [record.levelname for record in caplog.records] == ["INFO"] * 6
    for text in caplog.messages:
        assert verb in text
        assert text.endswith("; it is tried again")


@pytest.mark.parametrize(
    "error", [CircuitOpenError("open"), AccessDeniedError("no"), PreconditionError("there")]
)
async def test_these_errors_are_not_retried(error: StoreError) -> None:
    inner = MeteredStore(FailingStore(error))
    with pytest.raises(type(error)) as caught:
        await RetryingStore(inner, QUICK).get("key")
    assert caught.value is error
    assert inner.snapshot()["get"].calls == 1


async def test_a_hanging_attempt_is_cut_off_and_retried(faulty: FaultyStore) -> None:
    policy = replace(QUICK, attempts=10, attempt_timeout_s=0.05)
    await faulty.put("key", b"x")
    faulty.inject("get", "hang", times=2)
    assert await RetryingStore(faulty, policy).get("key") == b"x"


@pytest.mark.parametrize(
    ("fault", "policy", "attempts", "elapsed_s"),
    [
        # The limit of one attempt does not matter; a timeout is a TransientError.
        ("hang", replace(QUICK, total_timeout_s=0.02), range(1, 2), (0.02, 20)),
        # With full jitter a pause may be short, but 50 pauses of up to an hour cannot all be.
        ("error", RetryPolicy(50, 5, 5, base_delay_s=3600, max_delay_s=3600), range(50), (0, 60)),
    ],
)
async def test_the_total_time_cuts_off_the_running_attempt_and_allows_no_longer_pause(
    faulty: FaultyStore, fault: Any, policy: RetryPolicy, attempts: range, elapsed_s: Any
) -> None:
    faulty.inject("get", fault, times=99)
    with pytest.raises(TransientError) as caught:
        await asyncio.wait_for(RetryingStore(faulty, policy).get("key"), 20)
    assert caught.value.attempts in attempts
    assert elapsed_s[0] <= caught.value.elapsed_s < elapsed_s[1]


@pytest.mark.parametrize(
    ("fault", "theirs", "attempts"),
    [
        ("fail_after_commit", None, 0),  # its own object counts as written
        ("error", b"longer than mine", 2),  # another one does not
        ("error", b"thei", 2),
        ("error", b"", 2),
        (None, b"mine", 1),  # a first attempt is not ambiguous
    ],
)
async def test_a_create_after_a_lost_answer_succeeds_if_its_own_object_is_there(
    faulty: FaultyStore, memory: MemoryStore, fault: Any, theirs: bytes | None, attempts: int
) -> None:
    if theirs is not None:
        await memory.put("key", theirs)
    if fault:
        faulty.inject("put", fault)
    metered = MeteredStore(faulty)
    call = RetryingStore(metered, QUICK).put("key", b"mine", mode="create")
    if attempts:
        with pytest.raises(PreconditionError) as caught:
            await call
        assert caught.value.attempts == attempts
    else:
        await call
    assert await memory.get("key") == (b"mine" if theirs is None else theirs)
    if theirs is None or len(theirs) != len(b"mine"):  # another size is not downloaded
        assert metered.snapshot()["get"].bytes_in == (4 if theirs is None else 0)


async def test_a_create_that_timed_out_is_ambiguous_too() -> None:
    class CommitsAndHangs(MemoryStore):
        async def put(self, *args: Any, **kwargs: Any) -> None:
            await super().put(*args, **kwargs)
            await asyncio.Event().wait()

    policy = replace(QUICK, attempts=10, attempt_timeout_s=0.05)
    await RetryingStore(CommitsAndHangs(), policy).put("key", b"mine", mode="create")


# -- the breaker


@pytest.fixture
def breaking(faulty: FaultyStore, clock: FakeClock) -> BreakingStore:
    return BreakingStore(faulty, Breaker(3, 10, clock=clock))


async def fail(breaking: BreakingStore, faulty: FaultyStore, times: int) -> None:
    for _ in range(times):
        faulty.inject("head", "error")
        with pytest.raises(TransientError, match="injected"):
            await breaking.head("key")


async def test_it_opens_after_failures_in_a_row_and_passes_no_call(
    breaking: BreakingStore, faulty: FaultyStore, clock: FakeClock
) -> None:
    await fail(breaking, faulty, 2)
    assert breaking.breaker.state == "closed"
    await fail(breaking, faulty, 1)
    assert breaking.breaker.state == "open"
    clock.advance(9.9)
    for call in (*VERBS.values(), listed):
        with pytest.raises(CircuitOpenError, match="3 failures in a row"):
            await call(breaking, "key")


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
    breaking: BreakingStore, faulty: FaultyStore, clock: FakeClock
) -> None:
    """A failed probe opens it for as long again. Once closed, it counts failures from zero. A
    cancelled or illegal probe lets the next call probe."""
    await fail(breaking, faulty, 3)
    clock.advance(10)
    assert breaking.breaker.state == "half-open"
    await fail(breaking, faulty, 1)
    assert breaking.breaker.state == "open"
    clock.advance(10)
    faulty.inject("get", "hang")
    probe = asyncio.ensure_future(breaking.get("key"))
    await asyncio.sleep(0)
    with pytest.raises(CircuitOpenError, match="a probe is under way"):
        await breaking.get("key")
    probe.cancel()
    await asyncio.gather(probe, return_exceptions=True)
    with pytest.raises(ConfigError):
        await breaking.get("../x")
    assert breaking.breaker.state == "half-open"
    faulty.inject("get", "slow")
    results = await asyncio.gather(*(breaking.get("key") for _ in range(5)), return_exceptions=True)
    assert [type(each) for each in results] == [type(None)] + [CircuitOpenError] * 4
    await fail(breaking, faulty, 2)
    assert breaking.breaker.state == "closed"
    assert await breaking.get("key") is None


# -- counts


async def test_calls_and_bytes_are_counted_by_verb(faulty: FaultyStore) -> None:
    """Errors are counted by class, and without bytes."""
    store = MeteredStore(faulty)
    await store.put("key", b"12345")
    await store.put("key2", memoryview(array.array("I", [1, 2])))
    await store.get("key")
    await store.get("absent")
    await store.get_range("key", 2)
    await store.head("key")
    await store.delete("key2")
    await store.atomic_create()
    with pytest.raises(PreconditionError):
        await store.put("key", b"yy", mode="create")
    faulty.inject("put", "error", times=2)
    for _ in range(2):
        with pytest.raises(TransientError):
            await store.put("key", b"zzz")
    stats = store.snapshot()
    assert {verb: (s.calls, s.bytes_in, s.bytes_out) for verb, s in stats.items()} == {
        "get": (2, 5, 0), "get_range": (1, 2, 0), "head": (1, 0, 0), "put": (5, 0, 13),
        "delete": (1, 0, 0), "list": (0, 0, 0), "atomic_create": (1, 0, 0),
    }  # fmt: skip
    assert all(s.latency.count == s.calls for s in stats.values())
    assert stats["put"].errors == {"PreconditionError": 1, "TransientError": 2}


async def test_a_page_of_a_listing_is_one_call_without_the_consumers_time(clock: FakeClock) -> None:
    class Slow(WrapperStore):
        async def _around(self, verb: Verb, key: str, call: Callable[[], Awaitable[Any]]) -> Any:
            clock.advance({"get": 2, "list": 3}.get(verb, 0))
            return await call()

    store = MeteredStore(Slow(MemoryStore()), clock=clock)
    for key in ("a", "b", "c"):
        await store.put(key, b"")
        await store.get("a")
    async for _ in store.list():
        clock.advance(100)
    stats = store.snapshot()["list"]
    assert (stats.calls, stats.latency.total_s, stats.errors) == (1, 3.0, {})
    latency = store.snapshot()["get"].latency
    assert (latency.count, latency.total_s, latency.max_s) == (3, 6.0, 2.0)
