"""Prefetching: in the background, a few entries at once, as memory allows."""

from __future__ import annotations

import asyncio
import gc

import pytest

from s3cache.frame import Frame
from s3cache.store import AcceptSize, NotAccepted
from s3cache.tier import BackgroundLoop, Budget, Prefetch
from tests.support.caching import entry
from tests.support.waiting import LONG_S

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
