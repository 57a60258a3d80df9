"""Batches: blocking work on one worker thread, as much at once as has come up."""

from __future__ import annotations

import asyncio
import threading

import pytest

from s3cache.transfer import Batches
from tests.support.waiting import LONG_S


async def test_what_comes_together_is_worked_on_together_and_in_order() -> None:
    calls: list[list[int]] = []
    threads: set[int] = set()

    def work(items: list[int]) -> list[int | Exception]:
        calls.append(items)
        threads.add(threading.get_ident())
        return [item * 10 for item in items]

    batches = Batches(work, linger_s=0.001)
    assert await asyncio.gather(*map(batches, range(20))) == list(range(0, 200, 10))
    assert calls == [list(range(20))]
    assert threading.get_ident() not in threads


async def test_what_comes_while_it_works_is_the_next_batch() -> None:
    calls: list[list[int]] = []
    go_on = threading.Event()

    def work(items: list[int]) -> list[int | Exception]:
        calls.append(items)
        go_on.wait(LONG_S)
        return list(items)

    batches = Batches(work, linger_s=0)
    first = asyncio.ensure_future(batches(1))
    while not calls:
        await asyncio.sleep(0.001)
    rest = [asyncio.ensure_future(batches(number)) for number in (2, 3)]
    await asyncio.sleep(0.01)
    assert calls == [[1]]
    go_on.set()
    assert await asyncio.gather(first, *rest) == [1, 2, 3]
    assert calls == [[1], [2, 3]]


async def test_one_that_fails_fails_alone() -> None:
    def work(items: list[int]) -> list[int | Exception]:
        return [item or ZeroDivisionError() for item in items]

    batches = Batches(work, linger_s=0)
    one, failed, two = await asyncio.gather(*map(batches, (1, 0, 2)), return_exceptions=True)
    assert (one, two) == (1, 2)
    assert isinstance(failed, ZeroDivisionError)


async def test_a_batch_that_fails_as_a_whole_fails_for_all_and_the_next_works() -> None:
    failures = [OSError("no")]

    def work(items: list[int]) -> list[int | Exception]:
        if failures:
            raise failures.pop()
        return list(items)

    batches = Batches(work, linger_s=0)
    results = await asyncio.gather(*map(batches, (1, 2)), return_exceptions=True)
    assert [str(result) for result in results] == ["no", "no"]
    assert await batches(3) == 3


async def test_one_that_is_no_longer_wanted_is_left_out() -> None:
    calls: list[list[int]] = []

    def work(items: list[int]) -> list[int | Exception]:
        calls.append(items)
        return list(items)

    batches = Batches(work, linger_s=0.01)
    waiting = [asyncio.ensure_future(batches(number)) for number in (1, 2)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    assert await waiting[1] == 2
    assert calls == [[2]]


async def test_nobody_waits_for_a_worker_that_was_cancelled() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def work(items: list[int]) -> list[int | Exception]:
        begun.set()
        go_on.wait(LONG_S)
        return list(items)

    test = asyncio.current_task()
    batches = Batches(work, linger_s=0)
    waiting = [asyncio.ensure_future(batches(number)) for number in (1, 2)]
    while not begun.is_set():
        await asyncio.sleep(0.001)
    late = asyncio.ensure_future(batches(3))
    await asyncio.sleep(0)
    (worker,) = asyncio.all_tasks() - {test, late, *waiting}
    worker.cancel()
    for each_one in (*waiting, late):
        with pytest.raises(asyncio.CancelledError):
            await each_one
    go_on.set()
    assert await batches(4) == 4
