"""Wait no longer than a deadline for what may hang, and leave alone for a while what fails.

A file system that hangs cannot be interrupted: a dead NFS server, a frozen file system or a broken
disk blocks its caller for as long as it takes. So may a service that signs. So daemon threads make
the calls, and a caller waits for them until its deadline. A call that hangs goes on by itself.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Literal, TypeAlias, TypeVar

from s3cache.errors import CircuitOpenError, TransientError
from s3cache.util.forks import call_in_child
from s3cache.util.text import counted

__all__ = ["Breaker", "BreakerState", "DeadlineExecutor"]

_T = TypeVar("_T")
_Call: TypeAlias = "tuple[Callable[[], Any], Future[Any], bool]"

# Calls made at once, so that no more can ever hang.
_THREADS = 16
IDLE_S = 10.0  # after which a thread ends; the last one stays as long as there is a user
# Where something hangs another call is tried after this time, unless so many hang already.
PROBE_AFTER_S = 30.0
_PROBE_WAIT_S = 0.5
_MAX_HANGING = 8


class DeadlineExecutor:
    """Makes calls on other threads, and waits for each until a deadline; any thread may use it.

    After a call that took longer, calls fail at once, until those that hang have ended, or a
    probe, made now and then, succeeds. A call made within a call is made directly.

    Attributes:
        limit_s: how long a caller waits for one call. With all else that an exit does, 10 s.
    """

    limit_s = 5.0

    def __init__(self, name: str) -> None:
        self._name = name
        self._users = 1
        self._current = threading.local()
        self._begin()
        call_in_child(self._begin)

    @classmethod
    def of(cls, path: str) -> DeadlineExecutor:
        """Return the executor that this process shares for ``path``, until :meth:`release`."""
        made = cls(f"the file system of {path}")
        executor = _executors.setdefault(path, made)
        if executor is not made:
            with executor._mutex:
                executor._users += 1
        return executor

    def release(self) -> None:
        """Let the last thread end, too, if this was the last user."""
        with self._mutex:
            self._users -= 1

    def _begin(self) -> None:
        # The threads are the parent's: a child has none, and nothing that hangs.
        self._mutex = threading.Lock()
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)  # threads that wait for a call
        self._threads = 0
        self._hanging: set[Future[Any]] = set()
        self._breaker = Breaker(1, PROBE_AFTER_S)

    def call(self, work: Callable[[], _T], *, more_s: float = 0.0) -> _T:
        """Return or raise what ``work`` does within ``limit_s`` and ``more_s``.

        Raises:
            TransientError: it takes longer; ``work`` goes on.
            CircuitOpenError: an earlier call hangs; nothing was called.
        """
        if getattr(self._current, "is_ours", False):
            return work()
        is_probe = self._enter()
        limit_s = _PROBE_WAIT_S if is_probe else self.limit_s + more_s
        if not self._has_thread():
            self._breaker.leave(is_probe)
            return work()
        answer: Future[_T] = Future()
        self._calls.put((work, answer, is_probe))
        try:
            return answer.result(limit_s)
        except FutureTimeoutError:  # or what work has raised
            with self._mutex:
                if not (has_ended := answer.done()):
                    self._hanging.add(answer)
                    self._breaker.fail(is_probe)
            if has_ended:
                return answer.result()
            problem = f"{self._name} has not answered within {limit_s:g} s"
            raise TransientError(problem) from None
        finally:
            del answer  # its error's traceback leads here: no cycle

    def _enter(self) -> bool:
        """Return whether the call about to be made is a probe."""
        try:
            if len(self._hanging) < _MAX_HANGING:
                return self._breaker.enter()
        except CircuitOpenError:
            pass
        raise CircuitOpenError(f"{self._name} hangs, and is left alone until it answers")

    def _has_thread(self) -> bool:
        """Start a thread unless one is idle or there are enough; return whether there is any.

        None can be started once the interpreter exits. A call then waits for those that there are:
        what keeps them may hang, and would hang the caller's thread as well.
        """
        if self._idle.acquire(blocking=False):
            return True
        with self._mutex:
            if self._threads < _THREADS:
                thread = threading.Thread(target=self._work, name="s3cache-deadline", daemon=True)
                self._threads += 1
                try:
                    thread.start()
                except RuntimeError:
                    self._threads -= 1
            return self._threads > 0

    def _work(self) -> None:
        self._current.is_ours = True
        while True:
            try:
                call = self._calls.get(timeout=IDLE_S)
            except queue.Empty:
                with self._mutex:
                    # At the exit no other can be started. Not idle: a call is on its way.
                    may_end = self._threads > 1 or self._users <= 0
                    if may_end and self._idle.acquire(blocking=False):
                        self._threads -= 1
                        return
                continue
            self._make(*call)
            del call  # it holds the bytes to write

    def _make(self, work: Callable[[], Any], answer: Future[Any], is_probe: bool) -> None:
        value = error = None
        try:
            value = work()
        except BaseException as exc:  # noqa: BLE001 - it is the caller's
            error = exc
        with self._mutex:
            self._hanging.discard(answer)
            if is_probe or not self._hanging:
                self._breaker.succeed(True)
            self._idle.release()  # before the caller goes on, to have its next call made here
            if error is None:
                answer.set_result(value)
            else:
                answer.set_exception(error)
        del answer, error  # the error's traceback leads here: no cycle


_executors: weakref.WeakValueDictionary[str, DeadlineExecutor] = weakref.WeakValueDictionary()

BreakerState: TypeAlias = Literal["closed", "open", "half-open"]


class Breaker:
    """Decides whether a call may be made; any thread may call any method.

    Closed, calls pass, and ``failures`` in a row open it. Open, no call passes for
    ``reset_after_s``. Then it is half-open: exactly one call passes as a probe; its success closes
    the breaker, its failure opens it for as long again. What other calls come to, that began
    before it opened, does not count while it is open.

    Each call that :meth:`enter` lets pass ends with :meth:`succeed`, :meth:`fail` or, if it says
    nothing (it was cancelled), :meth:`leave`, with what ``enter`` returned.
    """

    def __init__(
        self, failures: int, reset_after_s: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most_failures = failures
        self._reset_after_s = reset_after_s
        self._clock = clock
        self._mutex = threading.Lock()
        self._failures = 0
        self._open_until: float | None = None
        self._probing = False

    @property
    def state(self) -> BreakerState:
        until = self._open_until
        if until is None:
            return "closed"
        return "half-open" if self._probing or self._clock() >= until else "open"

    def enter(self) -> bool:
        """Return whether the call about to be made is a probe.

        Raises:
            CircuitOpenError: it must not be made.
        """
        with self._mutex:
            if self._open_until is None:
                return False
            left_s = self._open_until - self._clock()
            if self._probing or left_s > 0:
                when = "a probe is under way" if self._probing else f"next probe in {left_s:.1f} s"
                raise CircuitOpenError(
                    f"circuit open after {counted(self._failures, 'failure')} in a row, {when}"
                )
            self._probing = True
            return True

    def succeed(self, is_probe: bool) -> None:
        """End a call that was answered."""
        self._end(is_probe, failed=False)

    def fail(self, is_probe: bool = False) -> None:
        """End a call that failed; or count a failure, such as a wait that was given up."""
        self._end(is_probe, failed=True)

    def leave(self, is_probe: bool) -> None:
        """End a call that says nothing: the next one is the probe then."""
        with self._mutex:
            self._probing &= not is_probe

    def _end(self, is_probe: bool, *, failed: bool) -> None:
        with self._mutex:
            if is_probe or self._open_until is None:
                self._failures = self._failures + 1 if failed else 0
                opens = failed and (is_probe or self._failures >= self._most_failures)
                self._open_until = self._clock() + self._reset_after_s if opens else None
            self._probing &= not is_probe
