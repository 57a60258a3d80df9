"""Downloads: shared, waited for with a deadline, and prefetched in the background."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from s3cache.errors import AccessDeniedError, ClosedError
from s3cache.store._sizes import announce
from s3cache.transfer import (
    BackgroundLoop,
    Downloads,
    DownloadTimeoutError,
    Listeners,
    TransferEvent,
)
from tests.unit.caching import eventually, in_thread

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass
class Thing:
    name: str
    size: int = 7


class Source:
    """Has everything but what is named ``absent...``; closed it lets everybody wait."""

    def __init__(self) -> None:
        self.is_open = True
        self.fetched: Counter[str] = Counter()
        self.landed: list[str] = []
        self.waiting = self.most_waiting = 0
        self.errors: dict[str, Exception] = {}

    async def fetch(self, name: str) -> Thing | None:
        self.fetched[name] += 1
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting)
        try:
            while not self.is_open:
                await asyncio.sleep(0.002)
            await asyncio.sleep(0)
        finally:
            self.waiting -= 1
        if name in self.errors:
            raise self.errors[name]
        if name.startswith("absent"):
            return None
        self.landed.append(name)
        return Thing(name)


@pytest.fixture
def source() -> Iterator[Source]:
    source = Source()
    yield source
    source.is_open = True


@pytest.fixture
def events() -> list[TransferEvent]:
    return []


@pytest.fixture
def loop() -> Iterator[BackgroundLoop]:
    loop = BackgroundLoop()
    yield loop
    loop.stop()


@pytest.fixture
def downloads(
    loop: BackgroundLoop, source: Source, events: list[TransferEvent]
) -> Downloads[Thing]:
    listeners = Listeners()
    listeners.add(events.append)
    downloads = Downloads(
        loop,
        source.fetch,
        concurrency=3,
        max_bytes=1 << 20,
        present=source.landed.__contains__,
        listeners=listeners,
    )
    downloads._largest = Thing.size  # not the first prefetch
    return downloads


def test_large_objects_are_prefetched_a_few_at_a_time(loop: BackgroundLoop, source: Source) -> None:
    """The first one tells how large they are."""
    for size, at_once in ((10, 8), (160, 3), (10_000, 1)):
        most: list[int] = []

        async def fetch(name: str, size: int = size, most: list[int] = most) -> Thing | None:
            source.waiting += 1
            most.append(source.waiting)
            await asyncio.sleep(0.01)
            source.waiting -= 1
            return Thing(name, size)

        downloads = Downloads(
            loop,
            fetch,
            concurrency=8,
            max_bytes=1_000,
            present=lambda _: False,
            listeners=Listeners(),
        )
        report = downloads.prefetch(f"{number}" for number in range(60)).wait(20)
        assert report.found == 60
        assert most[0] == 1
        assert max(most) == at_once


def test_what_proves_too_large_is_put_off_and_nothing_else_waits_for_it(
    loop: BackgroundLoop,
) -> None:
    """The first one was small; of the large ones only so many are read at once."""
    reading = most = 0
    announced: Counter[str] = Counter()

    async def fetch(name: str) -> Thing | None:
        nonlocal reading, most
        size = 1 if name == "first" else 200
        await asyncio.sleep(0.01)
        announced[name] += 1
        announce(size)
        reading += size
        most = max(most, reading)
        await asyncio.sleep(0.01)
        reading -= size
        return Thing(name, size)

    downloads = Downloads(
        loop,
        fetch,
        concurrency=8,
        max_bytes=1_000,
        present=lambda _: False,
        listeners=Listeners(),
    )
    prefetch = downloads.prefetch(["first", *map(str, range(30))])
    assert downloads.get("17", 20) == Thing("17", 200)
    report = prefetch.wait(20)
    assert (report.found, report.failed) == (31, 0)
    # One more for the lookup, which does not wait for memory.
    assert most <= 1_000 // 2 + 200
    assert max(announced.values()) > 1, "none was put off"
    assert loop.wait(_idle(downloads), 20)


async def _idle(downloads: Downloads[Thing]) -> bool:
    return downloads._budget.grow(0, 1_000) and not downloads.under_way


def test_whoever_waits_gets_what_a_prefetch_has_put_off(loop: BackgroundLoop) -> None:
    started, go_on = threading.Event(), threading.Event()
    tries: Counter[str] = Counter()

    async def fetch(name: str) -> Thing | None:
        tries[name] += 1
        if tries[name] == 1:
            started.set()
            await asyncio.to_thread(go_on.wait, 20)
            announce(5_000)
        return Thing(name, 10)

    downloads = Downloads(
        loop,
        fetch,
        concurrency=2,
        max_bytes=100,
        present=lambda _: False,
        listeners=Listeners(),
    )
    loop.wait(downloads._budget.take(90), 20)  # something else is under way
    downloads._largest = 1
    prefetch = downloads.prefetch(["large"])
    assert started.wait(20)
    joining = loop.submit(downloads._insist("large"))
    loop.wait(asyncio.sleep(0), 20)  # it has joined now
    go_on.set()
    assert joining.result(20) == Thing("large", 10)
    assert tries["large"] == 2
    prefetch.cancel()


def test_there_or_not(downloads: Downloads[Thing]) -> None:
    assert downloads.get("one", 20) == Thing("one")
    assert downloads.get("absent", 20) is None


def test_an_error_comes_as_it_is(downloads: Downloads[Thing], source: Source) -> None:
    source.errors["one"] = AccessDeniedError("no")
    with pytest.raises(AccessDeniedError):
        downloads.get("one", 20)


def test_its_steps_can_be_watched(
    downloads: Downloads[Thing], source: Source, events: list[TransferEvent]
) -> None:
    source.errors["bad"] = error = AccessDeniedError("no")
    downloads.get("one", 20)
    downloads.get("absent", 20)
    with pytest.raises(AccessDeniedError):
        downloads.get("bad", 20)
    assert [(event.step, event.name, event.size, event.error) for event in events] == [
        ("started", "one", 0, None),
        ("done", "one", 7, None),
        ("started", "absent", 0, None),
        ("absent", "absent", 0, None),
        ("started", "bad", 0, None),
        ("failed", "bad", 0, error),
    ]


def test_concurrent_requests_share_one_download(
    loop: BackgroundLoop, downloads: Downloads[Thing], source: Source
) -> None:
    source.is_open = False
    waiting = [loop.submit(downloads._join("one")) for _ in range(8)]
    join = in_thread(lambda: downloads.get("one", 20))
    eventually(lambda: len(asyncio.all_tasks(loop._loop)) == 1 + 9)
    source.is_open = True
    assert [each.result(20) for each in waiting] + [join()] == [Thing("one")] * 9
    assert source.fetched == {"one": 1}


def test_an_error_reaches_all_who_share_it(downloads: Downloads[Thing], source: Source) -> None:
    source.is_open = False
    source.errors["one"] = AccessDeniedError("no")
    joins = [in_thread(lambda: downloads.get("one", 20)) for _ in range(4)]
    eventually(lambda: source.waiting)
    source.is_open = True
    for join in joins:
        with pytest.raises(AccessDeniedError):
            join()


def test_a_late_download_still_lands_and_others_still_get_it(
    downloads: Downloads[Thing], source: Source
) -> None:
    source.is_open = False
    with pytest.raises(DownloadTimeoutError, match="no answer within"):
        downloads.get("one", 0.01)
    join = in_thread(lambda: downloads.get("one", 20))
    source.is_open = True
    assert join() == Thing("one")
    assert source.landed == ["one"] * source.fetched["one"]


def test_a_late_error_makes_no_noise(
    downloads: Downloads[Thing],
    source: Source,
    events: list[TransferEvent],
    caplog: pytest.LogCaptureFixture,
) -> None:
    source.is_open = False
    source.errors["one"] = AccessDeniedError("no")
    with pytest.raises(DownloadTimeoutError):
        downloads.get("one", 0.01)
    source.is_open = True
    eventually(lambda: [event for event in events if event.step == "failed"])
    downloads.close()
    assert caplog.text == ""


def test_waiting_on_the_background_thread_is_refused(
    loop: BackgroundLoop, downloads: Downloads[Thing]
) -> None:
    async def wait_for_itself() -> Any:
        return downloads.get("one", 20)

    with pytest.raises(RuntimeError, match="wait for itself"):
        loop.wait(wait_for_itself(), 20)


# -- prefetching


def test_a_prefetch_reports_what_it_found(downloads: Downloads[Thing], source: Source) -> None:
    source.errors["bad"] = AccessDeniedError("no")
    source.landed.append("here")
    report = downloads.prefetch(["one", "two", "absent", "bad", "here", "one"]).wait(20)
    assert (report.total, report.found, report.absent, report.failed, report.present) == (
        5,
        2,
        1,
        1,
        1,
    )
    assert report.size == 14
    assert report.complete
    assert isinstance(report.error, AccessDeniedError)
    assert source.fetched["here"] == 0


def test_even_a_mistake_stops_no_other_prefetch(
    downloads: Downloads[Thing], source: Source
) -> None:
    names = [f"{number}" for number in range(20)]
    source.errors = {name: RuntimeError("bug") for name in names[:8]}
    report = downloads.prefetch(names).wait(20)
    assert (report.found, report.failed, report.complete) == (12, 8, True)


def test_only_so_many_are_prefetched_at_once(downloads: Downloads[Thing], source: Source) -> None:
    source.is_open = False
    prefetch = downloads.prefetch(f"{number}" for number in range(50))
    eventually(lambda: source.waiting == 3)
    assert prefetch.wait(0.01).found == 0
    source.is_open = True
    assert prefetch.wait(20).found == 50
    assert source.most_waiting == 3


def test_a_request_joins_what_is_in_flight_and_passes_what_is_queued(
    downloads: Downloads[Thing], source: Source
) -> None:
    source.is_open = False
    downloads.prefetch(f"{number}" for number in range(50))
    eventually(lambda: source.waiting == 3)
    joining = in_thread(lambda: downloads.get("0", 20))
    passing = in_thread(lambda: downloads.get("49", 20))
    eventually(lambda: source.waiting == 4)
    assert source.fetched == {"0": 1, "1": 1, "2": 1, "49": 1}
    source.is_open = True
    assert (joining(), passing()) == (Thing("0"), Thing("49"))


def test_a_cancelled_prefetch_lands_what_was_under_way(
    downloads: Downloads[Thing], source: Source
) -> None:
    source.is_open = False
    prefetch = downloads.prefetch(f"{number}" for number in range(50))
    eventually(lambda: source.waiting == 3)
    prefetch.cancel()
    source.is_open = True
    eventually(lambda: len(source.landed) == 3)
    assert downloads.get("49", 20) == Thing("49")  # the loop has been round
    assert sorted(source.fetched) == ["0", "1", "2", "49"]
    assert not prefetch.wait(20).complete


# -- the end


def test_closing_cancels_downloads_and_prefetches_and_releases_whoever_waits(
    downloads: Downloads[Thing], source: Source
) -> None:
    source.is_open = False
    prefetch = downloads.prefetch(f"{number}" for number in range(50))
    join = in_thread(lambda: downloads.get("one", 20))
    eventually(lambda: source.waiting == 4)
    downloads.close()
    with pytest.raises(ClosedError):
        join()
    assert not prefetch.wait(20).complete
    assert source.waiting == 0
    with pytest.raises(ClosedError):
        downloads.get("two", 20)
    downloads.close()
