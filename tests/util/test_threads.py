"""No caller waits long for a disk that hangs, and no forked child for a thread of its parent."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from s3cache.errors import CircuitOpenError, TransientError
from s3cache.util import threads as module
from s3cache.util.threads import DeadlineExecutor
from tests.support.scripts import run_script
from tests.support.waiting import LONG_S, eventually, join_child


@pytest.fixture
def executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeadlineExecutor]:
    monkeypatch.setattr(DeadlineExecutor, "limit_s", LONG_S)
    executor = DeadlineExecutor.of(str(tmp_path))
    yield executor
    executor.release()


@pytest.fixture
def hang() -> Iterator[threading.Event]:
    """An event that stays unset until the end of the test: a thread that waits for it hangs."""
    event = threading.Event()
    yield event
    event.set()


def give_up(executor: DeadlineExecutor, work: Callable[[], object]) -> None:
    """Make a call that does not end in time; later calls may take as long as they need."""
    executor.limit_s = 0.05
    with pytest.raises(TransientError, match="has not answered"):
        executor.call(work)
    executor.limit_s = LONG_S


def disk_threads() -> int:
    return sum(thread.name == "s3cache-deadline" for thread in threading.enumerate())


def test_a_call_returns_or_raises_what_the_function_does(executor: DeadlineExecutor) -> None:
    assert executor.call(lambda: 7) == 7
    with pytest.raises(KeyError):
        executor.call(lambda: dict[str, int]()["a"])
    assert executor.call(lambda: threading.current_thread().daemon)
    assert executor.call(lambda: executor.call(threading.get_ident) == threading.get_ident())


def test_later_calls_work_after_a_call_that_ends_while_it_is_given_up(
    executor: DeadlineExecutor, hang: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call ends after it is given up and before it is counted as hanging."""

    class Slow(Future[bool]):
        def cancel(self) -> bool:
            was_given_up = super().cancel()
            hang.set()
            eventually(lambda: executor._hanging < 0)
            return was_given_up

    with monkeypatch.context() as patch:
        patch.setattr(module, "Future", Slow)
        give_up(executor, hang.wait)
    assert executor.call(lambda: True)


async def test_an_event_loop_runs_during_a_call(
    executor: DeadlineExecutor, hang: threading.Event
) -> None:
    """An error of the call is raised. If it hangs, that call and later ones are given up."""
    begun = threading.Event()
    call = asyncio.ensure_future(executor.run(lambda: (begun.wait(LONG_S), 7)))
    await asyncio.sleep(0)
    begun.set()
    assert await call == (True, 7)
    with pytest.raises(KeyError):
        await executor.run(lambda: dict[str, int]()["a"])
    executor.limit_s = 0.05
    with pytest.raises(TransientError, match="has not answered"):
        await executor.run(hang.wait)
    with pytest.raises(CircuitOpenError, match="not used until"):
        await executor.run(lambda: None)


def answers(executor: DeadlineExecutor) -> bool:
    try:
        return executor.call(lambda: True)
    except TransientError:
        return False


def test_calls_work_again_after_one_that_hangs_forever(
    hang: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is tried again now and then, because its server may be mounted again."""
    monkeypatch.setattr(module, "PROBE_AFTER_S", 0.1)
    executor = DeadlineExecutor("a disk")
    give_up(executor, hang.wait)
    assert not answers(executor)
    eventually(lambda: answers(executor))


def test_few_threads_hang_if_many_callers_do(
    hang: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PROBE_AFTER_S", 0.0)
    executor = DeadlineExecutor("a disk")
    executor.limit_s = 0.05
    before = disk_threads()
    failed: list[Exception] = []

    def call() -> None:
        try:
            executor.call(hang.wait)
        except TransientError as exc:
            failed.append(exc)

    with ThreadPoolExecutor(60) as callers:
        for _ in range(60):
            callers.submit(call)
    assert len(failed) == 60
    assert disk_threads() - before <= 16
    hang.set()
    eventually(lambda: answers(executor))


def test_calls_return_if_no_thread_can_start(
    executor: DeadlineExecutor, hang: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From Python 3.12, no thread starts at exit: a call then waits for the existing threads."""
    assert executor.call(threading.get_ident) != threading.get_ident()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert executor.call(threading.get_ident) != threading.get_ident()
    give_up(executor, hang.wait)
    assert not answers(executor)


def refuse(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_thread_continues_after_it_has_run_out_of_memory(
    executor: DeadlineExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = executor.call(threading.current_thread)
    with monkeypatch.context() as patch:

        def fail(*_: object) -> None:
            raise MemoryError

        patch.setattr(Future, "set_result", fail)
        give_up(executor, lambda: 7)
    executor._breaker.succeed(True)
    assert executor.call(threading.current_thread) is thread


def test_threads_end_with_the_last_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.05)
    users = [DeadlineExecutor.of("/gone") for _ in range(2)]
    thread = users[0].call(threading.current_thread)
    users.pop().release()
    thread.join(0.2)
    assert users[0].call(threading.current_thread) is thread
    users[0].release()
    thread.join(LONG_S)
    assert not thread.is_alive()
    late = users[0].call(threading.current_thread)
    late.join(LONG_S)
    assert not late.is_alive()
    known = weakref.ref(users.pop())
    eventually(lambda: gc.collect() >= 0 and known() is None)


def test_written_data_are_not_kept_in_memory(executor: DeadlineExecutor) -> None:
    class Data:
        pass

    data = Data()
    known = weakref.ref(data)
    executor.call(lambda data=data: None)  # type: ignore[misc]
    del data
    eventually(lambda: known() is None)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_calls_of_its_parent(
    executor: DeadlineExecutor, hang: threading.Event
) -> None:
    give_up(executor, hang.wait)
    child = os.fork()
    if child == 0:
        os._exit(0 if answers(executor) else 1)
    assert join_child(child) == 0


def test_a_fork_waits_for_callbacks_alone_and_not_for_long() -> None:
    """It waits neither for a loop that waits or was closed, nor forever for a callback."""
    done = run_script(
        """
        from s3cache.util import threads
        threads.LIMIT_S = 600.0
        state, stop = "out", False
        async def work():
            global state
            while not stop:
                state = "in"
                time.sleep(0.001)
                state = "out"
                await asyncio.sleep(0)
        working = background().submit(work())
        for _ in range(50):  # no callback is half done in a child
            child = os.fork()
            if child == 0: os._exit(0 if state == "out" else 1)
            assert join(child) == 0
        stop = True
        working.result(10)
        loop = threads.new_event_loop()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        child = os.fork()
        if child == 0: os._exit(0)
        assert join(child) == 0
        # A callback needs a lock of the forking thread: the child starts after a time limit.
        threads.LIMIT_S = 0.1
        lock, entered = threading.Lock(), threading.Event()
        def wait():
            entered.set()
            with lock: pass
        with lock:
            background().call(wait)
            entered.wait()
            child = os.fork()
        if child == 0:
            async def where(): return os.getpid()
            os._exit(0 if background().wait(where(), 10) == os.getpid() else 1)
        assert join(child) == 0
        background().stop()
        child = os.fork()
        if child == 0: os._exit(0)
        assert join(child) == 0
        """
    )
    assert done.stderr == ""


def test_a_child_renews_objects_in_the_order_they_were_registered() -> None:
    """It continues after one that fails, skips objects that are gone, and closes unshared files."""
    done = run_script(
        """
        import tempfile
        from s3cache.util import threads
        called = []
        class Thing:
            def __init__(self, name):
                self.name = name
                threads.call_in_child(self.renew)
            def renew(self):
                called.append(self.name)
                if self.name == "bad": raise ValueError("bad")
        file = tempfile.NamedTemporaryFile()
        fd = threads.open_unshared(file.name, os.O_RDWR)
        things = [Thing(name) for name in ("one", "bad", "two", "gone")]
        threads.call_in_child(lambda: called.append("function"))
        del things[-1]
        child = os.fork()
        if child == 0:
            print(*called, flush=True)
            try: os.fstat(fd)
            except OSError: os._exit(0)  # a child has no descriptor of an unshared file
            os._exit(1)
        assert join(child) == 0
        os.fstat(fd)
        threads.close_unshared(fd)
        print(*called)
        """
    )
    assert done.stdout.splitlines() == ["one bad two function", ""]
    assert "ValueError: bad" in done.stderr
