"""Prefetching: in the background, a few at once, as memory allows."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from s3cache.errors import AccessDeniedError
from s3cache.store import AcceptSize, NotAccepted
from s3cache.tier import BackgroundLoop, Prefetches, cancel_all
from tests.support.waiting import LONG_S, eventually

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

    async def fetch(self, name: str, admit: AcceptSize) -> Thing | None:
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
def loop() -> Iterator[BackgroundLoop]:
    loop = BackgroundLoop()
    yield loop
    loop.stop()


@pytest.fixture
def prefetches(loop: BackgroundLoop, source: Source) -> Prefetches:
    return Prefetches(
        loop,
        source.fetch,
        concurrency=3,
        max_bytes=1 << 20,
        present=source.landed.__contains__,
    )


@pytest.mark.parametrize(("size", "at_once"), [(10, 8), (160, 3), (10_000, 1)])
def test_only_so_many_bytes_are_read_at_once(loop: BackgroundLoop, size: int, at_once: int) -> None:
    """What does not fit now is asked for again, once there is memory; a large one goes alone."""
    reading = most = 0

    async def fetch(name: str, admit: AcceptSize) -> Thing | NotAccepted:
        nonlocal reading, most
        await asyncio.sleep(0.001)
        if not admit(size):
            return NotAccepted(size)
        reading += 1
        most = max(most, reading)
        await asyncio.sleep(0.01)
        reading -= 1
        return Thing(name, size)

    prefetches = Prefetches(loop, fetch, concurrency=8, max_bytes=1_000, present=lambda _: False)
    report = prefetches.start(map(str, range(60))).wait(LONG_S)
    assert (report.found, report.failed) == (60, 0)
    assert most == at_once

    async def all_is_given_back() -> bool:
        return prefetches.budget.grow(0, 1_000)

    assert loop.wait(all_is_given_back(), 20)


def test_a_prefetch_reports_what_it_found(prefetches: Prefetches, source: Source) -> None:
    source.errors["bad"] = AccessDeniedError("no")
    source.landed.append("here")
    report = prefetches.start(["one", "two", "absent", "bad", "here", "one"]).wait(LONG_S)
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


def test_stopping_ends_those_under_way(
    loop: BackgroundLoop, prefetches: Prefetches, source: Source
) -> None:
    source.is_open = False
    prefetch = prefetches.start(f"{number}" for number in range(50))
    eventually(lambda: source.waiting == 3)
    loop.wait(cancel_all(prefetches.running), 20)
    assert not prefetch.wait(LONG_S).complete
    assert source.waiting == 0
