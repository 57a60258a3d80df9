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
from typing import Any, Generic, TypeAlias, TypeVar

from s3cache.errors import CircuitOpenError, TransientError
from s3cache.util.forks import call_in_child

__all__ = ["DeadlineExecutor"]

_T = TypeVar("_T")

# Calls made at once, so that no more can ever hang.
_THREADS = 16
# Where something hangs another call is tried after this time, and after twice as long the next
# time, as long as no more than so many hang already.
PROBE_AFTER_S = 30.0
_PROBE_WAIT_S = 0.5
_MAX_HANGING = 8


class DeadlineExecutor:
    """Makes calls of one file system on other threads, and waits for each until a deadline.

    After a call that took longer, the file system counts as gone: calls fail at once, until the
    calls that hang have ended, or a probe, made now and then, succeeds.

    Any thread may call any method. A call made within a call is made directly.

    Attributes:
        limit_s: how long a caller waits for one call. With all else that an exit does, 10 s.
    """

    limit_s = 5.0

    def __init__(self, name: str) -> None:
        self._name = name
        self._users = 0
        self._current = threading.local()
        self._begin()
        call_in_child(self._begin)

    @classmethod
    def of(cls, path: str) -> DeadlineExecutor:
        """Return the executor that this process shares for ``path``, until :meth:`release`."""
        with _mutex:
            executor = _executors.get(path)
            if executor is None:
                executor = _executors[path] = cls(f"the file system of {path}")
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
        self._idle: queue.SimpleQueue[_Inbox] = queue.SimpleQueue()  # of threads without a call
        self._workers = 0
        self._is_gone = False
        self._hanging: set[_Call[Any]] = set()
        self._next_probe = 0.0

    def call(self, work: Callable[[], _T], *, more_s: float = 0.0) -> _T:
        """Return or raise what ``work`` does within ``limit_s`` and ``more_s``.

        Raises:
            TransientError: it takes longer; ``work`` goes on.
            CircuitOpenError: the file system hangs; nothing was called.
        """
        if getattr(self._current, "call", None) is not None:
            return work()
        is_probe = self._is_gone
        limit_s = self._begin_probe() if is_probe else self.limit_s + more_s
        deadline = time.monotonic() + limit_s
        if not self._free.acquire(timeout=limit_s):
            raise self._late(limit_s)
        call = _Call(work, is_probe)
        try:
            self._hand_over(call, deadline)
        except queue.Empty:
            self._free.release()
            raise self._late(limit_s) from None
        except RuntimeError:  # there is no thread, and none can be started
            self._free.release()
            return work()
        try:
            call.inbox.get(timeout=max(deadline - time.monotonic(), 0))
        except queue.Empty:
            if self._give_up(call):
                raise self._late(limit_s) from None
        return call.result()

    def _hand_over(self, call: _Call[Any], deadline: float) -> None:
        """Have a thread make the call: an idle one, else a new one.

        Raises:
            queue.Empty: no thread can be started, as at the exit, and none has become idle: what
                keeps them may hang, and would hang this thread as well.
            RuntimeError: no thread can be started, and there is none.
        """
        try:
            worker = self._idle.get_nowait()
        except queue.Empty:
            worker = queue.SimpleQueue()
            thread = threading.Thread(
                target=self._work, args=(worker,), name="s3cache-disk", daemon=True
            )
            self._count_workers(+1)  # before it hangs, and others ask whether there is one
            try:
                thread.start()
            except RuntimeError:
                self._count_workers(-1)
                if not self._workers:
                    raise
                worker = self._idle.get(timeout=max(deadline - time.monotonic(), 0))
        worker.put(call)

    def _count_workers(self, more: int) -> None:
        with self._mutex:
            self._workers += more

    def _work(self, inbox: _Inbox) -> None:
        while (call := inbox.get()) is not None:
            self._current.call = call
            call.make()
            self._current.call = None
            with self._mutex:
                call.has_ended = True
                self._hanging.discard(call)
                if call.is_probe or not self._hanging:
                    self._is_gone = False
            # Before the caller goes on, whose next call then finds this thread.
            self._idle.put(inbox)
            self._free.release()
            if self._users <= 0:
                self._end_unused()
            call.inbox.put(None)
            del call
        self._count_workers(-1)

    def _begin_probe(self) -> float:
        """Return how long to wait for a probe, if one is due."""
        with self._mutex:
            now = time.monotonic()
            if now < self._next_probe or len(self._hanging) >= _MAX_HANGING:
                raise CircuitOpenError(f"{self._name} hangs, and is left alone until it answers")
            self._next_probe = now + PROBE_AFTER_S
            return _PROBE_WAIT_S

    def _give_up(self, call: _Call[Any]) -> bool:
        """Leave the call to itself; return False if it has ended after all."""
        with self._mutex:
            if call.has_ended:
                return False
            self._next_probe = time.monotonic() + PROBE_AFTER_S * 2 ** len(self._hanging)
            self._hanging.add(call)
            self._is_gone = True
            return True

    def _late(self, limit_s: float) -> TransientError:
        return TransientError(f"{self._name} has not answered within {limit_s:g} s")


class _Call(Generic[_T]):
    """One call, made by a worker.

    Attributes:
        inbox: gets ``None`` at the end.
    """

    __slots__ = ("_error", "_value", "_work", "has_ended", "inbox", "is_probe")

    def __init__(self, work: Callable[[], _T], is_probe: bool) -> None:
        self._work: Callable[[], _T] | None = work
        self._error: BaseException | None = None
        self.is_probe = is_probe
        self.has_ended = False
        self.inbox: queue.SimpleQueue[None] = queue.SimpleQueue()

    def make(self) -> None:
        work, self._work = self._work, None  # it holds the bytes to write
        assert work is not None
        try:
            self._value = work()
        except BaseException as exc:  # noqa: BLE001 - it is the caller's
            self._error = exc

    def result(self) -> _T:
        error, self._error = self._error, None
        if error is None:
            return self._value
        try:
            raise error
        finally:
            del error  # its traceback leads here: no cycle


#: Where a thread gets its next call; ``None`` for it to end.
_Inbox: TypeAlias = "queue.SimpleQueue[_Call[Any] | None]"

_executors: weakref.WeakValueDictionary[str, DeadlineExecutor] = weakref.WeakValueDictionary()
_mutex = threading.Lock()


def _renew_mutex() -> None:
    global _mutex
    _mutex = threading.Lock()


call_in_child(_renew_mutex)
