"""The remote tier: downloads are shared, have a deadline, and land on the disk; prefetches too."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from s3cache import entries
from s3cache.entries import Replaceable
from s3cache.errors import ClosedError, CorruptError, DownloadTimeoutError
from s3cache.frame import Frame
from s3cache.stats import Counters, Listeners, TransferEvent
from s3cache.store import AcceptSize, MemoryStore, NotAccepted, Store
from s3cache.tier import (
    BackgroundLoop,
    Budget,
    DiskTier,
    LocalTier,
    Prefetch,
    RemoteTier,
    background,
)
from s3cache.util.logs import Problems
from tests.support.caching import entry, settings
from tests.support.stores import GatedStore
from tests.support.stores import put as put_object
from tests.support.waiting import LONG_S, eventually, in_thread, tasks_on

ONE = entries.first_name("one")


class Remote:
    """A tier, the store behind it, and its events."""

    def __init__(self, disk: DiskTier | None, store: Store, **changes: Any) -> None:
        self.events: list[TransferEvent] = []
        replaceable, listeners = Replaceable(everything=False), Listeners()
        listeners.subscribe(self.events.append)
        local = LocalTier(disk, Counters(), Problems(strict=False), replaceable)
        self.tier = RemoteTier(store, settings(None, **changes), listeners, local, replaceable)


NewRemote = Callable[..., Remote]


@pytest.fixture
def gated(memory: MemoryStore) -> GatedStore:
    return GatedStore(memory)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskTier]:
    disk = DiskTier(tmp_path / "disk", max_bytes=1 << 30, max_files=1_000)
    yield disk
    disk.close()


@pytest.fixture
def open_remote(disk: DiskTier, gated: GatedStore) -> Iterator[NewRemote]:
    opened: list[Remote] = []

    def opener(store: Store = gated, **changes: Any) -> Remote:
        opened.append(Remote(disk, store, **changes))
        return opened[-1]

    yield opener
    gated.is_open = True
    for remote in opened:
        remote.tier.close(5)


@pytest.fixture
def remote(open_remote: NewRemote) -> Remote:
    return open_remote()


def put(memory: MemoryStore, *keys: str, size: int = 100) -> None:
    for key in keys:
        put_object(memory, entries.first_name(key), entry(key, payload=b"x" * size).data)


@pytest.fixture
def prefetching(
    open_remote: NewRemote, memory: MemoryStore, gated: GatedStore
) -> tuple[Remote, Prefetch]:
    """A prefetch of 50 objects, three of which have started and wait at the gate."""
    keys = [f"key{number}" for number in range(50)]
    put(memory, *keys)
    remote = open_remote(download_concurrency=3)
    gated.is_open = False
    prefetch = remote.tier.prefetch(map(entries.first_name, keys))
    eventually(lambda: gated.waiting == 3)
    return remote, prefetch


# Before Python 3.11 the time limit of an attempt is a separate task (asyncio.wait_for).
DOWNLOAD_TASKS = 1 if sys.version_info >= (3, 11) else 2


def tasks() -> int:
    return tasks_on(background())


def settled_tasks() -> int:
    """Return the number of tasks once it has not changed for a moment."""
    counts = [-1]

    def is_settled() -> bool:
        time.sleep(0.05)
        counts.append(tasks())
        return counts[-1] == counts[-2]

    eventually(is_settled)
    return counts[-1]


def test_a_download_reports_its_steps(remote: Remote, memory: MemoryStore) -> None:
    put(memory, "one")
    put_object(memory, entries.first_name("bad"), b"no frame")
    found = remote.tier.load(ONE, 20)
    assert found is not None
    remote.tier.load(entries.first_name("absent"), 20)
    with pytest.raises(CorruptError):
        remote.tier.load(entries.first_name("bad"), 20)
    steps = [(each.step, each.name.split("/")[-1], each.size) for each in remote.events]
    ends = [("done", "one.0", found.size), ("absent", "absent.0", 0), ("failed", "bad.0", 0)]
    assert steps == [step for end in ends for step in (("started", end[1], 0), end)]
    assert isinstance(remote.events[-1].error, CorruptError)


def test_concurrent_requests_share_one_download(
    remote: Remote, memory: MemoryStore, gated: GatedStore
) -> None:
    put(memory, "one")
    gated.is_open = False
    before = tasks()
    joins = [in_thread(lambda: remote.tier.load(ONE, 20)) for _ in range(8)]
    eventually(lambda: tasks() == before + DOWNLOAD_TASKS + 8)
    gated.is_open = True
    assert all(join() is not None for join in joins)
    assert gated.count("get") == 1


def test_an_error_after_the_deadline_is_not_logged(
    remote: Remote, memory: MemoryStore, gated: GatedStore, caplog: pytest.LogCaptureFixture
) -> None:
    put_object(memory, ONE, b"no frame")
    gated.is_open = False
    with pytest.raises(DownloadTimeoutError):
        remote.tier.load(ONE, 0.01)
    gated.is_open = True
    eventually(lambda: [event for event in remote.events if event.step == "failed"])
    remote.tier.close(5)
    assert caplog.text == ""


def test_a_request_joins_a_started_download_and_overtakes_queued_ones(
    prefetching: tuple[Remote, Prefetch], gated: GatedStore
) -> None:
    remote, prefetch = prefetching
    joining = in_thread(lambda: remote.tier.load(entries.first_name("key0"), 20))
    overtaking = in_thread(lambda: remote.tier.load(entries.first_name("key49"), 20))
    eventually(lambda: gated.waiting == 4)
    assert sorted(name for _, name in gated.calls) == sorted(
        map(entries.first_name, ("key0", "key1", "key2", "key49"))
    )
    gated.is_open = True
    assert joining() is not None
    assert overtaking() is not None
    assert prefetch.wait(LONG_S).complete


def test_a_cancelled_prefetch_lands_downloads_that_have_started(
    prefetching: tuple[Remote, Prefetch], gated: GatedStore, disk: DiskTier
) -> None:
    remote, prefetch = prefetching
    prefetch.cancel()
    gated.is_open = True
    eventually(lambda: len([*disk.objects()]) == 3)
    assert remote.tier.load(entries.first_name("key49"), 20)  # the loop has run since
    assert len([*disk.objects()]) == 4
    assert not prefetch.wait(LONG_S).complete


def test_a_caller_gets_an_object_that_a_prefetch_postpones_for_lack_of_memory(
    open_remote: NewRemote, memory: MemoryStore, gated: GatedStore
) -> None:
    """It does not wait for memory, but reads the object itself."""
    keys = [*(f"other{number}" for number in range(7)), "large"]
    put(memory, *keys, size=5_000)
    remote = open_remote(prefetch_max_bytes=6_000, download_concurrency=16)
    gated.is_open = False
    prefetch = remote.tier.prefetch(map(entries.first_name, keys))
    eventually(lambda: gated.waiting == 8)
    before = settled_tasks()
    join = in_thread(lambda: remote.tier.load(entries.first_name("large"), 20))
    eventually(lambda: tasks() == before + 1)  # it has joined
    gated.is_open = True
    assert join() is not None
    assert prefetch.wait(LONG_S).found == 8
    assert gated.count("get") > 8, "none was postponed"


def test_closing_cancels_downloads_and_prefetches_and_releases_callers(
    prefetching: tuple[Remote, Prefetch], gated: GatedStore
) -> None:
    remote, prefetch = prefetching
    join = in_thread(lambda: remote.tier.load(entries.first_name("key49"), 20))
    eventually(lambda: gated.waiting == 4)
    remote.tier.close(5)
    with pytest.raises(ClosedError):
        join()
    assert not prefetch.wait(LONG_S).complete
    assert gated.waiting == 0
    with pytest.raises(ClosedError):
        remote.tier.load(entries.first_name("two"), 20)
    remote.tier.close(5)


THING = entry()


@pytest.mark.parametrize(("of_budget", "at_once"), [(0.01, 8), (0.32, 3), (20.0, 1)])
def test_the_number_of_bytes_read_at_once_is_bounded(
    loop: BackgroundLoop, of_budget: float, at_once: int
) -> None:
    """Large entries are read alone. Only requests for entries of unknown size are refused."""
    reading = most = refused = 0
    max_bytes = 100_000
    budget = Budget(max_bytes)
    size = int(of_budget * max_bytes / 2)  # it takes twice its size

    async def fetch(name: str, admit: AcceptSize) -> Frame | NotAccepted:
        nonlocal reading, most, refused
        await asyncio.sleep(0.001)
        if not admit(size):
            refused += 1
            return NotAccepted(size)
        reading += 1
        most = max(most, reading)
        await asyncio.sleep(0.01)
        reading -= 1
        return THING

    prefetch = Prefetch(map(str, range(60)))
    loop.wait(prefetch.run(fetch, lambda _: [], budget, 8), LONG_S)
    assert (prefetch.report().found, prefetch.report().failed) == (60, 0)
    assert most == at_once
    assert refused <= 8
    assert budget.grow(0, 2 * max_bytes), "the budget was not returned"


def test_an_entry_is_freed_before_the_next_one_is_requested(loop: BackgroundLoop) -> None:
    """Otherwise each worker keeps an entry that the budget no longer counts."""
    alive: list[int] = []

    async def fetch(name: str, admit: AcceptSize) -> Frame | NotAccepted:
        gc.collect()
        alive.append(sum(type(each) is Frame for each in gc.get_objects()))
        return entry()

    prefetch = Prefetch("abc")
    loop.wait(prefetch.run(fetch, lambda _: [], Budget(1 << 20), 1), LONG_S)
    assert prefetch.report().found == 3
    assert len({*alive}) == 1
