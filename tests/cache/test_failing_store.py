"""A store that fails costs misses with a reason and one warning."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from s3cache.cache import Cache, Hit, Miss, Saved
from s3cache.errors import (
    AccessDeniedError,
    ClosedError,
    ConfigError,
    CorruptError,
    NoSpaceError,
    PermanentError,
    TransientError,
)
from s3cache.stats import Reason
from s3cache.store import MemoryStore
from tests.cache.answers import FIRST, miss
from tests.support.caching import KEY, OTHER, entry
from tests.support.stores import FailingStore, holds
from tests.support.waiting import LONG_S

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TransientError("reset"), Reason.UNAVAILABLE),
        (PermanentError("gone"), Reason.UNAVAILABLE),
        (AccessDeniedError("403"), Reason.DENIED),
        (NoSpaceError("quota"), Reason.FULL),
        (CorruptError("body", "digest"), Reason.CORRUPT),
        (ClosedError("closed"), Reason.UNAVAILABLE),
        (ConfigError("store", "bad", "fix it"), Reason.UNAVAILABLE),
        (RuntimeError("bug"), Reason.ERROR),
        (KeyError("bug"), Reason.ERROR),
        (OSError("raw"), Reason.ERROR),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, Exception) else str(each),
)
def test_whatever_a_store_raises_is_a_miss_with_its_reason_and_one_warning(
    machine: Callable[..., Cache],
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    reason: Reason,
) -> None:
    cache = machine(store=FailingStore(error))
    for _ in range(3):
        found = cache.lookup(KEY)
        assert miss(found) == reason
        assert isinstance(found, Miss)
        assert found.error is error
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    # A mistake in s3cache comes with its traceback, other people's trouble without.
    assert bool(record.exc_info) == (reason is Reason.ERROR)
    assert cache.prefetch([KEY]).wait(LONG_S).failed == 1
    assert isinstance(cache.save(KEY, entry()), Saved)
    given_up = reason is Reason.CORRUPT
    assert cache.flush(20 if given_up else 0.2).remaining == (0 if given_up else 1)
    assert isinstance(cache.lookup(KEY, lambda found: False), Miss)
    found = cache.lookup(OTHER, lambda found: False)
    assert miss(found) == reason
    assert cache.stats().misses == {reason: 5}


def test_a_guard_that_fails_is_a_miss(
    machine: Callable[..., Cache], caplog: pytest.LogCaptureFixture
) -> None:
    cache = machine()
    cache.save(KEY, entry())
    found = cache.lookup(KEY, lambda found: 1 / 0 > 1)
    assert miss(found) == Reason.ERROR
    assert caplog.records[0].exc_info


@pytest.mark.parametrize(
    "error", [ConfigError("store", "bad", "fix it"), AccessDeniedError("403"), RuntimeError("bug")]
)
def test_a_remote_that_cannot_be_opened_costs_no_save(
    tmp_path: Path, memory: MemoryStore, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    from tests.support.caching import settings

    broken_still = [True]

    def open_remote() -> MemoryStore:
        if broken_still:
            raise error
        return memory

    with Cache(settings(tmp_path), open_remote=open_remote, identity="place") as cache:
        for _ in range(2):
            assert isinstance(cache.lookup(OTHER), Miss)
            assert isinstance(cache.save(KEY, entry()), Saved)
        assert cache.prefetch([OTHER]).wait(LONG_S).failed == 1
        report = cache.flush(20)
        assert (report.remaining, report.error) == (1, error)
        assert isinstance(cache.lookup(KEY), Hit)
        # lookup, save or flush, prefetch
        assert len(caplog.records) == 3
        broken_still.clear()
        assert cache.flush(20).complete
    assert holds(memory, FIRST)
