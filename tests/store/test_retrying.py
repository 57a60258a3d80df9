"""Retries: of which errors, how often, for how long, and after a lost answer."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from s3cache.errors import (
    AccessDeniedError,
    CircuitOpenError,
    PreconditionError,
    StoreError,
    TransientError,
)
from s3cache.store import MemoryStore, MeteredStore, RetryingStore, RetryPolicy
from tests.support.contract import VERBS, listed
from tests.support.faulty import FaultyStore, FaultyVerb

QUICK = RetryPolicy(
    attempts=4, total_timeout_s=30, attempt_timeout_s=30, base_delay_s=0.0, max_delay_s=0.0
)


@pytest.mark.parametrize("verb", ["get", "get_range", "head", "put", "delete"])
async def test_a_transient_error_is_retried_and_logged(
    faulty: FaultyStore, verb: FaultyVerb, caplog: pytest.LogCaptureFixture
) -> None:
    """The error of the last attempt has the number of attempts and the time they took."""
    faulty.inject(verb, "error", times=3 + 4)
    store = RetryingStore(faulty, QUICK)
    with caplog.at_level("INFO", "s3cache.storage"):
        with pytest.raises(TransientError, match="gave up after 4 attempts") as caught:
            await VERBS[verb](store, "key")
        assert type(caught.value) is TransientError
        assert caught.value.attempts == 4
        assert caught.value.elapsed_s > 0
        assert (caught.value.op, caught.value.key) == (verb, "key")
        await VERBS[verb](store, "key")
    assert faulty.counts == {(verb, "error"): 7}
    messages = [(each.levelname, each.getMessage()) for each in caplog.records]
    assert [level for level, _ in messages] == ["INFO"] * 6
    assert all(verb in text and text.endswith("; it is tried again") for _, text in messages)


@pytest.mark.parametrize(
    "error", [CircuitOpenError("open"), AccessDeniedError("no"), PreconditionError("there")]
)
async def test_these_errors_are_not_retried(error: StoreError) -> None:
    class Failing(MemoryStore):
        calls = 0

        async def get(self, key: str, admit: object = None) -> bytes | None:
            self.calls += 1
            raise error

    inner = Failing()
    with pytest.raises(type(error)) as caught:
        await RetryingStore(inner, QUICK).get("key")
    assert caught.value is error
    assert inner.calls == 1


async def test_a_hanging_attempt_is_cut_off_and_retried(faulty: FaultyStore) -> None:
    policy = dataclasses.replace(QUICK, attempts=10, attempt_timeout_s=0.05)
    await faulty.put("key", b"x")
    faulty.inject("get", "hang", times=2)
    assert await RetryingStore(faulty, policy).get("key") == b"x"


async def test_the_total_time_cuts_off_the_running_attempt(faulty: FaultyStore) -> None:
    """The limit of one attempt does not matter; a timeout is a TransientError."""
    policy = dataclasses.replace(QUICK, total_timeout_s=0.02)
    faulty.inject("get", "hang", times=9)
    with pytest.raises(TransientError, match="no answer within") as caught:
        await asyncio.wait_for(RetryingStore(faulty, policy).get("key"), 20)
    assert caught.value.attempts == 1
    assert caught.value.elapsed_s >= 0.02


async def test_no_pause_begins_that_would_exceed_the_total_time(faulty: FaultyStore) -> None:
    """With full jitter a pause may be short, but 50 pauses of up to an hour cannot all be."""
    policy = RetryPolicy(
        attempts=50, total_timeout_s=5, attempt_timeout_s=5, base_delay_s=3600, max_delay_s=3600
    )
    faulty.inject("get", "error", times=99)
    with pytest.raises(TransientError) as caught:
        await asyncio.wait_for(RetryingStore(faulty, policy).get("key"), 20)
    assert caught.value.attempts < 50
    assert caught.value.elapsed_s < 60


class TestCreateAfterALostAnswer:
    async def test_its_own_object_counts_as_written(
        self, faulty: FaultyStore, memory: MemoryStore
    ) -> None:
        faulty.inject("put", "fail_after_commit")
        await RetryingStore(faulty, QUICK).put("key", b"mine", mode="create")
        assert await memory.get("key") == b"mine"

    @pytest.mark.parametrize("theirs", [b"longer than mine", b"thei", b""])
    async def test_another_object_does_not_count_as_written(
        self, faulty: FaultyStore, memory: MemoryStore, theirs: bytes
    ) -> None:
        await memory.put("key", theirs)
        faulty.inject("put", "error")
        with pytest.raises(PreconditionError) as caught:
            await RetryingStore(faulty, QUICK).put("key", b"mine", mode="create")
        assert caught.value.attempts == 2
        assert await memory.get("key") == theirs

    async def test_another_size_is_not_downloaded(
        self, faulty: FaultyStore, memory: MemoryStore
    ) -> None:
        await memory.put("key", b"longer than mine")
        faulty.inject("put", "error")
        metered = MeteredStore(faulty)
        with pytest.raises(PreconditionError):
            await RetryingStore(metered, QUICK).put("key", b"mine", mode="create")
        assert metered.snapshot()["get"].bytes_in == 0

    async def test_a_first_attempt_is_not_ambiguous(
        self, faulty: FaultyStore, memory: MemoryStore
    ) -> None:
        """Another writer stored equal bytes first, so the create fails."""
        await memory.put("key", b"mine")
        with pytest.raises(PreconditionError):
            await RetryingStore(faulty, QUICK).put("key", b"mine", mode="create")

    async def test_a_time_out_is_ambiguous(self) -> None:
        class CommitsAndHangs(MemoryStore):
            async def put(self, *args: object, **kwargs: object) -> None:
                await super().put(*args, **kwargs)  # type: ignore[arg-type]
                await asyncio.Event().wait()

        policy = dataclasses.replace(QUICK, attempts=10, attempt_timeout_s=0.05)
        await RetryingStore(CommitsAndHangs(), policy).put("key", b"mine", mode="create")


async def test_a_page_of_a_listing_is_retried(faulty: FaultyStore) -> None:
    await faulty.put("a/key", b"")
    faulty.inject("list", "error", times=3 + 4)
    store = RetryingStore(faulty, QUICK)
    with pytest.raises(TransientError) as caught:
        await listed(store, "a/")
    assert (caught.value.op, caught.value.key, caught.value.attempts) == ("list", "a/", 4)
    assert [*await listed(store, "a/")] == ["a/key"]
