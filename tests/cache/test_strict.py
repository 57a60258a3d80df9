"""Strict: what would otherwise be a miss and a warning is raised; what is no failure is not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from s3cache import entries
from s3cache.cache import Cache, Hit, Miss, NotSaved, Saved
from s3cache.errors import (
    AccessDeniedError,
    CorruptError,
    DownloadTimeoutError,
    NoSpaceError,
    PermanentError,
    TransientError,
)
from s3cache.stats import Reason
from s3cache.store import MemoryStore
from tests.support.caching import KEY, OTHER, broken, entry, open_cache, settings
from tests.support.stores import FailingStore, GatedStore, put

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def strict(tmp_path: Path) -> Iterator[Callable[..., Cache]]:
    caches: list[Cache] = []

    def open_strict(store: Any, *, local: bool = True, **changes: Any) -> Cache:
        where = tmp_path / "tier" if local else None
        caches.append(open_cache(where, store, strict=True, **changes))
        return caches[-1]

    yield open_strict
    for cache in caches:
        cache.close(0)


@pytest.mark.parametrize(
    "error",
    [TransientError("reset"), PermanentError("gone"), AccessDeniedError("no"), RuntimeError("bug")],
)
def test_a_lookup_raises_what_the_store_raised_and_counts_it(
    strict: Callable[..., Cache], error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    cache = strict(FailingStore(error))
    for _ in range(2):
        with pytest.raises(type(error)) as caught:
            cache.lookup(KEY)
        assert caught.value is error
    assert cache.stats().lookups == 2
    assert caplog.records == []


def test_a_lookup_raises_when_nothing_came_in_time(strict: Callable[..., Cache]) -> None:
    gated = GatedStore(MemoryStore(), is_open=False)
    cache = strict(gated, lookup_timeout_s=0.01)
    with pytest.raises(DownloadTimeoutError):
        cache.lookup(KEY)
    assert cache.stats().misses == {Reason.TIMEOUT: 1}


def test_a_lookup_raises_on_damage_in_either_tier(
    strict: Callable[..., Cache], tmp_path: Path
) -> None:
    memory = MemoryStore()
    cache = strict(memory)
    put(memory, entries.first_name(KEY), broken(entry()))
    with pytest.raises(CorruptError):
        cache.lookup(KEY)
    cache.save(OTHER, entry(OTHER))
    for file in (tmp_path / "tier" / "objects").rglob("*._"):
        file.write_bytes(b"no frame")
    with pytest.raises(CorruptError):
        cache.lookup(OTHER)


def test_absence_modes_and_guards_are_no_failures(strict: Callable[..., Cache]) -> None:
    cache = strict(MemoryStore())
    assert isinstance(cache.lookup(KEY), Miss)
    assert isinstance(cache.save(KEY, entry()), Saved)
    assert isinstance(cache.lookup(KEY, lambda found: False), Miss)
    assert isinstance(cache.lookup(KEY), Hit)
    reader = strict(MemoryStore(), mode="read-only")
    assert isinstance(reader.save(KEY, entry()), NotSaved)
    off = strict(MemoryStore(), mode="off")
    assert isinstance(off.lookup(KEY), Miss)


def test_a_guard_that_fails_raises(strict: Callable[..., Cache]) -> None:
    cache = strict(MemoryStore())
    cache.save(KEY, entry())
    with pytest.raises(ZeroDivisionError):
        cache.lookup(KEY, lambda found: 1 / 0 > 1)


def test_a_save_raises_when_the_queue_is_full(strict: Callable[..., Cache]) -> None:
    gated = GatedStore(MemoryStore(), is_open=False)
    cache = strict(gated, local=False, upload_queue_max_count=1)
    cache.save(KEY, entry())
    with pytest.raises(NoSpaceError):
        cache.save(OTHER, entry(OTHER))
    assert cache.stats().not_saved == {Reason.FULL: 1}
    gated.is_open = True


def test_a_remote_that_cannot_be_opened_raises(tmp_path: Path) -> None:
    def open_remote() -> MemoryStore:
        raise AccessDeniedError("403")

    cache = Cache(settings(tmp_path, strict=True), open_remote=open_remote)
    for call in (
        cache.start,
        lambda: cache.lookup(KEY),
        lambda: cache.save(KEY, entry()),
        lambda: cache.prefetch([KEY]),
    ):
        with pytest.raises(AccessDeniedError):
            call()
    cache.close()


def test_an_upload_that_fails_is_warned_of_not_raised(
    strict: Callable[..., Cache], caplog: pytest.LogCaptureFixture
) -> None:
    """It happens later, on another thread: there is no caller to raise it to."""
    cache = strict(FailingStore(AccessDeniedError("403")))
    assert isinstance(cache.save(KEY, entry()), Saved)
    report = cache.flush(20)
    assert isinstance(report.error, AccessDeniedError)
    assert "an upload failed" in caplog.text
