"""Limit how long a caller waits for a file system: one that hangs cannot be interrupted.

A dead NFS server, a frozen file system or a broken disk blocks its caller for as long as it takes.
So daemon threads make the calls, and a caller waits for them until its deadline. A call that hangs
goes on by itself; when it ends, the file system is back.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Generic, TypeAlias, TypeVar

from s3cache._forks import call_in_child
from s3cache.errors import CircuitOpenError, TransientError

__all__ = ["DeadlineExecutor"]

_T = TypeVar("_T")

# So many calls are made at once, and no more can ever hang.
_THREADS = 16
# Where something hangs another call is tried after so long, and after twice as long the next time,
# is waited for so long, and is not tried where so many hang already.
PROBE_AFTER_S = 30.0
_PROBE_WAIT_S = 0.5
_HANGING_AT_MOST = 8


class DeadlineExecutor:
    """Make calls of one file system on other threads, and wait for each until a deadline.

    After a call that took longer, the file system counts as gone: calls fail at once, until the
    calls that hang have ended, or a probe, made now and then, succeeds.

    Any thread may call any method. A call made within a call is made directly.

    Attributes:
        limit_s: how long a caller waits for one call. With all else that an exit does, 10 s.
    """

    limit_s = 5.0

    def __init__(self, what: str) -> None:
        self._what = what
        self._users = 0
        self._within = threading.local()
        self._begin()
        call_in_child(self._begin)

    @classmethod
    def of(cls, path: str) -> DeadlineExecutor:
        """Return the executor that this process shares for ``path``, until :meth:`release`."""
        with _mutex:
            executor = _known.get(path)
            if executor is None:
                executor = _known[path] = cls(f"the file system of {path}")
            executor._users += 1
            return executor

    def release(self) -> None:
        """End the threads with the last user; a later call starts a new one."""
        with _mutex:
            self._users -= 1
        self._end_unused()

    def _end_unused(self) -> None:
        with contextlib.suppress(queue.Empty):  # others take from it too
            while self._users <= 0:
                self._idle.get_nowait().put(None)

    def _begin(self) -> None:
        # The threads are the parent's: a child has none, and nothing that hangs.
        self._mutex = threading.Lock()
        self._free = threading.Semaphore(_THREADS)
        self._idle: queue.SimpleQueue[_Calls] = queue.SimpleQueue()  # of threads without one
        self._workers = 0
        self._is_gone = False
        self._hanging: set[_Call] = set()
        self._next_probe = 0.0

    def call(self, work: Callable[[], _T], *, more_s: float = 0.0) -> _T:
        """Return or raise what ``work`` does within ``limit_s`` and ``more_s``.

        Raises:
            TransientError: it takes longer; ``work`` goes on.
            CircuitOpenError: the file system hangs; nothing was called.
        """
        if self._current() is not None:
            return work()
        is_probe = self._is_gone
        limit_s = self._may_probe() if is_probe else self.limit_s + more_s
        deadline = time.monotonic() + limit_s
        if not self._free.acquire(timeout=limit_s):
            raise self._took_longer(limit_s)
        result: _Result[_T] = _Result(work)
        call = _Call(result.make, is_probe)
        try:
            self._hand_to_worker(call, deadline)
        except queue.Empty:
            self._free.release()
            raise self._took_longer(limit_s) from None
        except RuntimeError:  # there is no thread, and none can be had: as well as can be
            self._free.release()
            return work()
        try:
            while asked := call.asked.get(timeout=max(deadline - time.monotonic(), 0)):
                asked()
        except queue.Empty:
            if self._give_up(call):
                raise self._took_longer(limit_s) from None
        return result.get()

    def run_while_waiting(self, work: Callable[[], None]) -> None:
        """Within a call: have the thread that waits for it run ``work`` while the call goes on.

        It runs before the call returns. Outside of a call, or after the deadline, it does not run.
        It must be short, for it is not interrupted, and raise nothing.
        """
        call = self._current()
        if call is not None:
            call.asked.put(work)

    def _current(self) -> _Call | None:
        """Return the call that this thread makes."""
        return getattr(self._within, "call", None)

    def _hand_to_worker(self, call: _Call, deadline: float) -> None:
        """Have a thread make the call: an idle one, else a new one.

        Raises:
            queue.Empty: no thread can be started, as at the exit, and none has become idle: what
                keeps them may hang, and would hang this thread as well.
            RuntimeError: no thread can be started, and there is none.
        """
        try:
            idle = self._idle.get_nowait()
        except queue.Empty:
            try:
                self._start_worker(call)
            except RuntimeError:
                if not self._workers:
                    raise
                idle = self._idle.get(timeout=max(deadline - time.monotonic(), 0))
            else:
                return
        idle.put(call)

    def _start_worker(self, call: _Call) -> None:
        calls: _Calls = queue.SimpleQueue()
        calls.put(call)
        thread = threading.Thread(
            target=self._work, args=(calls,), name="s3cache-disk", daemon=True
        )
        self._count_workers(+1)  # before it hangs, and others want to know whether there is one
        try:
            thread.start()
        except RuntimeError:
            self._count_workers(-1)
            raise

    def _count_workers(self, more: int) -> None:
        with self._mutex:
            self._workers += more

    def _work(self, calls: _Calls) -> None:
        while (call := calls.get()) is not None:
            self._within.call = call
            call.make()
            self._within.call = None
            with self._mutex:
                call.has_ended = True
                self._hanging.discard(call)
                if call.is_probe or not self._hanging:
                    self._is_gone = False
            # Before the caller goes on, whose next call then finds this thread.
            self._idle.put(calls)
            self._free.release()
            if self._users <= 0:
                self._end_unused()
            call.asked.put(None)
            del call
        self._count_workers(-1)

    def _may_probe(self) -> float:
        """Return how long to wait for a probe, if one is due."""
        with self._mutex:
            now = time.monotonic()
            if now < self._next_probe or len(self._hanging) >= _HANGING_AT_MOST:
                raise CircuitOpenError(f"{self._what} hangs, and is left alone until it answers")
            self._next_probe = now + PROBE_AFTER_S
            return _PROBE_WAIT_S

    def _give_up(self, call: _Call) -> bool:
        """Leave the call to itself; return False if it has ended after all."""
        with self._mutex:
            if call.has_ended:
                return False
            self._next_probe = time.monotonic() + PROBE_AFTER_S * 2 ** len(self._hanging)
            self._hanging.add(call)
            self._is_gone = True
            return True

    def _took_longer(self, limit_s: float) -> TransientError:
        return TransientError(f"{self._what} has not answered within {limit_s:g} s")


class _Result(Generic[_T]):
    """What comes of a piece of work."""

    __slots__ = ("_error", "_value", "_work")

    def __init__(self, work: Callable[[], _T]) -> None:
        self._work: Callable[[], _T] | None = work
        self._error: BaseException | None = None

    def make(self) -> None:
        work, self._work = self._work, None  # it holds the bytes to write
        assert work is not None
        try:
            self._value = work()
        except BaseException as exc:  # noqa: BLE001 - it is the caller's
            self._error = exc

    def get(self) -> _T:
        error, self._error = self._error, None
        if error is None:
            return self._value
        try:
            raise error
        finally:
            del error  # its traceback leads here: no cycle


class _Call:
    """One call, made by a worker.

    Attributes:
        asked: what the thread that waits is to run; ``None`` at the end.
    """

    __slots__ = ("asked", "has_ended", "is_probe", "make")

    def __init__(self, make: Callable[[], None], is_probe: bool) -> None:
        self.make = make
        self.is_probe = is_probe
        self.has_ended = False
        self.asked: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()


#: Where a thread gets its next call; ``None`` for it to end.
_Calls: TypeAlias = "queue.SimpleQueue[_Call | None]"

_mutex = threading.Lock()
_known: weakref.WeakValueDictionary[str, DeadlineExecutor] = weakref.WeakValueDictionary()


def _renew_mutex() -> None:
    global _mutex
    _mutex = threading.Lock()


call_in_child(_renew_mutex)
