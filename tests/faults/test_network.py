"""A link fails in every possible way: lookups miss in time, saves arrive once it works again."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from s3cache import Cache
from s3cache.cache import Hit, Miss, Saved
from s3cache.errors import CircuitOpenError, Reason, TransientError
from s3cache.stats import TransferEvent
from tests.support.marks import slow
from tests.support.processes import KEYS
from tests.support.proxy import Link, Proxy
from tests.support.waiting import LONG_S, eventually
from tests.support.worker import entry, key, keys

SIZE = 200_000
KEY = key("shared")
HANGS = Link(flows=False)

OpenCache = Callable[..., Cache]


@pytest.fixture
def open_cache(tmp_path: Path, url: str, proxy: Proxy) -> Iterator[OpenCache]:
    """Return a function that opens a cache on an empty disk, with its remote behind the proxy."""
    with ExitStack() as caches:

        def open_cache(**options: Any) -> Cache:
            usual = {
                "local_dir": str(tmp_path / uuid.uuid4().hex),
                "endpoint_url": proxy.url,
                "exit_timeout_s": 0.5,
                "lookup_timeout_s": 20.0,
                "retry_attempts": 3,
                "breaker_failures": 100,
                **KEYS,
            }
            cache = Cache.open(url, **{**usual, **options})
            caches.callback(cache.close)
            return cache

        yield open_cache
        proxy.heal()  # requests that hang can end


@pytest.fixture
def reader(open_cache: OpenCache) -> Iterator[OpenCache]:
    """Return a function that opens caches that have used the remote, but not its entry ``KEY``."""
    writer = open_cache()
    for each in (KEY, key("warm")):
        writer.save(each, entry(each, SIZE))
    assert writer.flush().complete

    def open_reader(**options: Any) -> Cache:
        cache = open_cache(**options)
        # A lookup may time out while the client is created.
        eventually(lambda: not cache.prefetch([key("warm")]).wait(LONG_S).failed)
        assert isinstance(cache.lookup(key("warm")), Hit)
        return cache

    return open_reader  # type: ignore[return-value]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def is_right(result: Hit | Miss, key: str = KEY) -> bool:
    return isinstance(result, Hit) and bytes(result.entry.data) == entry(key, SIZE)


REFUSES = "refuses"
Bad = tuple[Link | str, Reason]
# The behaviour of the link, and the reason of a lookup's miss.
BAD: dict[str, Bad] = {
    "refuses": (REFUSES, Reason.UNAVAILABLE),
    "hangs": (HANGS, Reason.TIMEOUT),
    "resets requests": (Link(reset_up=50), Reason.UNAVAILABLE),
    "resets answers": (Link(reset_down=50_000), Reason.UNAVAILABLE),
    "cuts answers": (Link(cut_down=50_000), Reason.UNAVAILABLE),
    "is late": (Link(delay_s=30.0), Reason.TIMEOUT),
    "is slow": (Link(bytes_per_s=1_000), Reason.TIMEOUT),
}


def break_link(proxy: Proxy, link: Link | str) -> None:
    if isinstance(link, Link):
        proxy.link = link
    else:
        proxy.refuse()


def bad_links(first: str, *others: str) -> pytest.MarkDecorator:
    """Run a test with several links, all but the first with the slow tests."""
    slow_ones = [pytest.param(BAD[name], id=name, marks=slow) for name in others]
    return pytest.mark.parametrize("bad", [pytest.param(BAD[first], id=first), *slow_ones])


# --- lookups


@bad_links("cuts answers", *(name for name in BAD if name != "cuts answers"))
def test_a_lookup_over_a_bad_link_misses_in_time_with_a_reason(
    bad: Bad, proxy: Proxy, reader: OpenCache, caplog: pytest.LogCaptureFixture
) -> None:
    """Repeated misses log one warning. Lookups hit again once the link works."""
    link, reason = bad
    patience_s = 0.7 if reason is Reason.TIMEOUT else 20.0
    cache = reader()
    hasty = reader(lookup_timeout_s=patience_s, local_dir=cache.settings.local_dir)
    caplog.clear()
    break_link(proxy, link)
    started = time.monotonic()
    results = [hasty.lookup(KEY) for _ in range(2)]
    assert time.monotonic() - started < LONG_S
    assert [r.reason for r in results if isinstance(r, Miss)] == [reason, reason]
    assert hasty.stats().misses == {reason: 2}
    (warning,) = warnings(caplog)
    assert "counts as a miss" in warning
    proxy.heal()
    assert is_right(cache.lookup(KEY))


@pytest.mark.parametrize(
    "link",
    [
        Link(cut_down=90_000, times=2),
        pytest.param(Link(reset_up=50, times=1), marks=slow),
        pytest.param(Link(reset_down=9_000, times=2), marks=slow),
    ],
    ids=["answer cut", "request reset", "answer reset"],
)
def test_a_broken_download_is_retried(link: Link, proxy: Proxy, reader: OpenCache) -> None:
    """The lookup hits with all bytes."""
    cache = reader()
    before = proxy.broken
    proxy.link = link
    assert is_right(cache.lookup(KEY))
    assert proxy.broken == before + link.times


@pytest.mark.parametrize(
    "link", [HANGS, pytest.param(Link(bytes_per_s=100_000), marks=slow)], ids=["hangs", "slow"]
)
def test_a_late_download_reaches_the_local_tier(
    link: Link, proxy: Proxy, reader: OpenCache
) -> None:
    """The lookup times out, the download continues, and the next lookup hits the local tier."""
    cache = reader(lookup_timeout_s=0.5)
    landed: list[TransferEvent] = []
    cache.subscribe(lambda event: landed.append(event) if event.step == "done" else None)
    proxy.link = link
    result = cache.lookup(KEY)
    assert isinstance(result, Miss)
    assert result.reason is Reason.TIMEOUT
    assert not landed
    if link is HANGS:
        proxy.heal()
    eventually(lambda: landed)
    proxy.refuse()
    again = cache.lookup(KEY)
    assert is_right(again)
    assert isinstance(again, Hit)
    assert again.tier == "local"
    assert len(proxy.made("GET", KEY)) == 1


def test_lookups_do_not_wait_while_the_breaker_is_open_and_recover_later(
    proxy: Proxy, reader: OpenCache
) -> None:
    cache = reader(breaker_failures=1, breaker_reset_s=1.0, retry_attempts=1)
    proxy.refuse()
    assert isinstance(cache.lookup(KEY), Miss)
    spared = cache.lookup(KEY)
    assert isinstance(spared, Miss)
    assert spared.reason is Reason.UNAVAILABLE
    assert isinstance(spared.error, CircuitOpenError)
    assert cache.stats().breaker == "open"
    proxy.heal()
    eventually(lambda: is_right(cache.lookup(KEY)))
    assert cache.stats().breaker == "closed"


@bad_links("hangs", "refuses", "resets answers", "is slow")
def test_a_prefetch_over_a_bad_link_reports_failures_and_a_second_one_completes(
    bad: Bad, proxy: Proxy, reader: OpenCache
) -> None:
    link, _ = bad
    wanted = [KEY, key("warm"), key("absent")]
    cache = reader(attempt_timeout_s=1.5, retry_timeout_s=3.0)
    break_link(proxy, link)
    report = cache.prefetch(wanted).wait(LONG_S)
    assert report.complete
    # The answer for "absent" is short, and passes links that break long answers.
    assert (report.found, report.present) == (0, 1)
    assert report.failed + report.absent == 2
    assert report.failed
    assert isinstance(report.error, TransientError)
    proxy.heal()
    report = cache.prefetch(wanted).wait(LONG_S)
    assert (report.found, report.present, report.absent, report.failed) == (1, 1, 1, 0)
    proxy.refuse()
    assert is_right(cache.lookup(KEY))


# --- saves


@bad_links("refuses", "hangs", "resets requests")
def test_entries_saved_over_a_bad_link_arrive_once_it_works_again(
    bad: Bad, proxy: Proxy, open_cache: OpenCache, caplog: pytest.LogCaptureFixture
) -> None:
    """Saves do not wait, and warn once; the uploads need no further call."""
    link, _ = bad
    cache = open_cache(upload_timeout_s=1.0, retry_attempts=2)
    break_link(proxy, link)
    retried: list[TransferEvent] = []
    cache.subscribe(lambda event: retried.append(event) if event.step == "retried" else None)
    for each in keys(0, 5):
        saved = cache.save(each, entry(each, SIZE))
        assert isinstance(saved, Saved)
        assert saved.durable
    eventually(lambda: len(retried) >= 2)
    proxy.heal()
    eventually(lambda: cache.stats().pending == 0)
    # More if an entry's record was found before the entry was queued.
    assert cache.stats().uploaded >= 5
    (warning,) = warnings(caplog)
    assert "an upload failed" in warning
    other = open_cache()
    assert all(is_right(other.lookup(each), each) for each in keys(0, 5))
