"""The background loop: one thread, which ends when it is stopped and at exit."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading

import pytest

from s3cache.errors import ClosedError
from s3cache.tier import BackgroundLoop
from tests.support.scripts import run_script
from tests.support.waiting import in_thread


async def _name_of_thread() -> str:
    return threading.current_thread().name


async def _forever() -> None:
    await asyncio.Event().wait()


def test_a_wait_ends_at_its_timeout_and_cancels_the_work(loop: BackgroundLoop) -> None:
    ended = threading.Event()

    async def work() -> None:
        try:
            await _forever()
        finally:
            ended.set()

    with pytest.raises(concurrent.futures.TimeoutError):
        loop.wait(work(), 0.01)
    assert ended.wait(10)


def test_calls_that_race_with_a_stop_are_released() -> None:
    """Each gets its result or a ``ClosedError``; none waits forever."""
    for _ in range(20):
        loop = BackgroundLoop()
        loop.wait(_name_of_thread(), 10)

        def call(loop: BackgroundLoop = loop) -> str:
            try:
                while True:
                    loop.wait(_name_of_thread(), None)
            except ClosedError:
                return "released"

        joins = [in_thread(call) for _ in range(4)]
        loop.stop()
        assert [join() for join in joins] == ["released"] * 4
        loop.stop()  # again
        with pytest.raises(ClosedError):
            loop.call(print)


def test_the_existing_thread_does_the_work_if_no_more_threads_can_start(
    loop: BackgroundLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From Python 3.12, no thread can start while the interpreter exits."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    async def on_threads() -> list[str]:
        return await asyncio.gather(
            *(asyncio.to_thread(lambda: threading.current_thread().name) for _ in range(4))
        )

    loop.wait(_name_of_thread(), 10)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert loop.wait(on_threads(), 10) == ["s3cache_0"] * 4


@pytest.mark.parametrize("error", [MemoryError, SystemError])  # SystemError: C code lost the first
def test_it_continues_after_it_has_run_out_of_memory(
    loop: BackgroundLoop, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No callback can catch an error between two callbacks, which would end the thread.

    asyncio cannot even reset which loop is running.
    """
    failures = 0

    set_running_loop = asyncio.events._set_running_loop

    def fail_to_reset(_: object) -> None:
        monkeypatch.setattr("asyncio.events._set_running_loop", set_running_loop)
        raise error

    async def run_out() -> None:
        selector = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]
        select = selector.select

        def fail(timeout: float | None = None) -> object:
            nonlocal failures
            failures += 1
            if failures < 3:
                monkeypatch.setattr("asyncio.events._set_running_loop", fail_to_reset)
                raise error
            selector.select = select
            return select(timeout)

        selector.select = fail

    loop.wait(run_out(), 10)
    assert loop.wait(_name_of_thread(), 10) == "s3cache"
    assert failures == 3


def test_at_exit_all_closers_run_before_the_loop_ends_and_only_their_errors_are_printed() -> None:
    """A worker that hangs, in a name lookup or a dead mount, does not keep the process alive."""
    done = run_script(
        """
        entered = threading.Event()
        def hang():
            entered.set()
            time.sleep(3600)
        async def answer(): return await asyncio.to_thread(lambda: 42)
        async def hanging(): await asyncio.to_thread(hang)
        async def forever():
            try: await asyncio.Event().wait()
            finally: print("cancelled")
        before_exit(lambda: 1 / 0)  # the others run all the same
        before_exit(lambda: print(background().wait(answer(), 5)))
        forget = before_exit(lambda: print("not this one")); forget()
        running = [background().submit(forever()) for _ in range(3)]  # nothing else holds them
        background().wait(answer(), 5)
        background().submit(hanging())
        assert entered.wait(10)
        """
    )
    assert done.stdout.split() == ["42", "cancelled", "cancelled", "cancelled"]
    assert done.stderr.count("closing at exit failed") == done.stderr.count("Traceback") == 1
