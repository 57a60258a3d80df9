"""A link that fails in every way there is: lookups miss in time, saves arrive when it heals."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from s3cache import Cache, Hit, Miss, Reason, Saved, TransferEvent
from s3cache.errors import CircuitOpenError, TransientError
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
    """A function that opens a cache on an empty disk, its remote behind the proxy."""
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
        proxy.heal()  # what hangs ends


@pytest.fixture
def reader(open_cache: OpenCache) -> Iterator[OpenCache]:
    """Opens caches that have used the remote, which holds an entry under ``KEY``, but not that."""
    writer = open_cache()
    for each in (KEY, key("warm")):
        writer.save(each, entry(each, SIZE))
    assert writer.flush().complete

    def open_reader(**options: Any) -> Cache:
        cache = open_cache(**options)
        # Not by a lookup, for which making a client may take too long here.
        eventually(lambda: not cache.prefetch([key("warm")]).wait(LONG_S).failed)
        assert isinstance(cache.lookup(key("warm")), Hit)
        return cache

    return open_reader  # type: ignore[return-value]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def is_right(result: Hit | Miss, key: str = KEY, size: int = SIZE) -> bool:
    return isinstance(result, Hit) and bytes(result.entry.data) == entry(key, size)


REFUSES = "refuses"
Bad = tuple[Link | str, Reason]
# What the link does, and the reason that a lookup gives.
BAD: dict[str, Bad] = {
    "refuses": (REFUSES, Reason.UNAVAILABLE),
    "hangs": (HANGS, Reason.TIMEOUT),
    "resets requests": (Link(reset_up=50), Reason.UNAVAILABLE),
    "resets answers": (Link(reset_down=50_000), Reason.UNAVAILABLE),
    "cuts answers": (Link(cut_down=50_000), Reason.UNAVAILABLE),
    "is late": (Link(delay_s=30.0), Reason.TIMEOUT),
    "is slow": (Link(bytes_per_s=1_000), Reason.TIMEOUT),
}


def make(proxy: Proxy, link: Link | str) -> None:
    if isinstance(link, Link):
        proxy.link = link
    else:
        proxy.refuse()


def bad_links(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("bad", [BAD[name] for name in names], ids=names)


# --- lookups


@bad_links(*BAD)
def test_a_lookup_over_a_bad_link_is_a_miss_with_its_reason_in_time(
    bad: Bad,
    proxy: Proxy,
    reader: OpenCache,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """... with one warning however often; and a hit again once the link is good."""
    link, reason = bad
    patience_s = 0.7 if reason is Reason.TIMEOUT else 20.0
    cache = reader()
    hasty = reader(lookup_timeout_s=patience_s, local_dir=cache.settings.local_dir)
    caplog.clear()
    make(proxy, link)
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
    [Link(reset_up=50, times=1), Link(reset_down=9_000, times=2), Link(cut_down=90_000, times=2)],
    ids=["request reset", "answer reset", "answer cut"],
)
def test_a_broken_download_is_tried_again(link: Link, proxy: Proxy, reader: OpenCache) -> None:
    """The lookup notices nothing: it gets all the bytes."""
    cache = reader()
    before = proxy.broken
    proxy.link = link
    result = cache.lookup(KEY)
    assert is_right(result)
    assert proxy.broken == before + link.times


@pytest.mark.parametrize("link", [HANGS, Link(bytes_per_s=100_000)], ids=["hangs", "slow"])
def test_a_late_download_lands_in_the_local_tier(
    link: Link, proxy: Proxy, reader: OpenCache
) -> None:
    """The lookup's patience ends, the download goes on; the next lookup has it from the disk."""
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


def test_the_breaker_spares_lookups_the_wait_and_lets_them_recover(
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


@bad_links("refuses", "hangs", "resets answers", "cuts answers", "is slow")
def test_a_prefetch_over_a_bad_link_reports_and_a_second_one_completes(
    bad: Bad, proxy: Proxy, reader: OpenCache
) -> None:
    link, _ = bad
    wanted = [KEY, key("warm"), key("absent")]
    cache = reader(attempt_timeout_s=1.5, retry_timeout_s=3.0)
    make(proxy, link)
    report = cache.prefetch(wanted).wait(LONG_S)
    assert report.complete
    # "absent" is a short answer, which passes the links that break long ones.
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


@bad_links("refuses", "hangs", "resets requests", "is slow")
def test_what_is_saved_over_a_bad_link_arrives_by_itself_when_it_heals(
    bad: Bad,
    proxy: Proxy,
    open_cache: OpenCache,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Saving waits for nothing and warns once; the rest follows without a request."""
    link, _ = bad
    cache = open_cache(upload_timeout_s=1.0, retry_attempts=2)
    make(proxy, link)
    retried: list[TransferEvent] = []
    cache.subscribe(lambda event: retried.append(event) if event.step == "retried" else None)
    for each in keys(0, 5):
        saved = cache.save(each, entry(each, SIZE))
        assert isinstance(saved, Saved)
        assert saved.durable
    eventually(lambda: len(retried) >= 2)
    proxy.heal()
    eventually(lambda: cache.stats().pending == 0)
    assert cache.stats().uploaded >= 5  # again, where its record was found before it was queued
    (warning,) = warnings(caplog)
    assert "an upload failed" in warning
    other = open_cache()
    assert all(is_right(other.lookup(each), each) for each in keys(0, 5))
