"""A limit on how long anybody waits for a file system: one that hangs cannot be interrupted.

A dead NFS server, a frozen file system or a broken disk keeps whoever calls it for as long as it
takes. So the calls are made by daemon threads, and the caller waits for one of them so long and no
longer. What hangs goes on by itself, and its end says that the file system is back.
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

__all__ = ["Patience"]

_T = TypeVar("_T")

# So many calls are made at once, and no more can ever hang.
_THREADS = 16
# Where something hangs another call is tried after so long, and after twice as long the next time,
# is waited for so long, and is not tried where so many hang already.
PROBE_AFTER_S = 30.0
_PROBE_WAIT_S = 0.5
_HANGING_AT_MOST = 8


class Patience:
    """Makes calls of one file system, and waits for each of them for so long at most.

    After one that took longer, the file system is taken for gone: calls fail at once, until what
    hangs has ended, or one of those that are tried now and then does.

    Any thread may call any method. A call made within a call is simply made.

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
    def of(cls, path: str) -> Patience:
        """The one that all who use ``path`` in this process share, until :meth:`release`."""
        with _mutex:
            patience = _known.get(path)
            if patience is None:
                patience = _known[path] = cls(f"the file system of {path}")
            patience._users += 1
            return patience

    def release(self) -> None:
        """The threads end with the last user; what calls all the same starts one anew."""
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
        """What ``work`` returns or raises, if it takes no more than ``more_s`` above the limit.

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
            while meanwhile := call.said.get(timeout=max(deadline - time.monotonic(), 0)):
                meanwhile()
        except queue.Empty:
            if self._give_up(call):
                raise self._took_longer(limit_s) from None
        return result.get()

    def meanwhile(self, work: Callable[[], None]) -> None:
        """Within a call: have who waits for it do something while it goes on.

        It is done before the call returns, and not at all outside of a call, or where nobody waits
        any more. It must be short, for it is not interrupted, and raise nothing.
        """
        call = self._current()
        if call is not None:
            call.said.put(work)

    def _current(self) -> _Call | None:
        """The call that this thread makes."""
        return getattr(self._within, "call", None)

    def _hand_to_worker(self, call: _Call, deadline: float) -> None:
        """Have a thread make the call: one that has nothing to do, else a new one.

        Raises:
            queue.Empty: no more can be started, as at the exit, and those there are have not come
                back: what keeps them may hang, and would hang for whoever made it himself.
            RuntimeError: none can be started, and there are none.
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
            call.said.put(None)
            del call
        self._count_workers(-1)

    def _may_probe(self) -> float:
        """How long to wait, if now is the time to try again."""
        with self._mutex:
            now = time.monotonic()
            if now < self._next_probe or len(self._hanging) >= _HANGING_AT_MOST:
                raise CircuitOpenError(f"{self._what} hangs, and is left alone until it answers")
            self._next_probe = now + PROBE_AFTER_S
            return _PROBE_WAIT_S

    def _give_up(self, call: _Call) -> bool:
        """Let the call go on by itself; false if it has ended after all."""
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
        said: what who waits is to do meanwhile; ``None`` at the end.
    """

    __slots__ = ("has_ended", "is_probe", "make", "said")

    def __init__(self, make: Callable[[], None], is_probe: bool) -> None:
        self.make = make
        self.is_probe = is_probe
        self.has_ended = False
        self.said: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()


#: Where a thread gets its next call; ``None`` for it to end.
_Calls: TypeAlias = "queue.SimpleQueue[_Call | None]"

_mutex = threading.Lock()
_known: weakref.WeakValueDictionary[str, Patience] = weakref.WeakValueDictionary()


def _renew_mutex() -> None:
    global _mutex
    _mutex = threading.Lock()


call_in_child(_renew_mutex)
