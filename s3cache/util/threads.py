"""Threads that neither hang a program nor break its forks: deadlines for calls, safe forks.

A lock that another thread held at the fork stays locked in the child: that of a module that is
being imported, or one inside OpenSSL, which hangs any use of TLS and the exit. So we delay a fork
while one of our threads runs such code (:func:`new_event_loop`). A ``flock`` belongs to the open
file: it would outlive the parent while the child keeps its copy. So the child closes the files of
:func:`open_unshared`. Other state of a process is replaced in the child (:func:`call_in_child`).

A file system that hangs cannot be interrupted: a dead NFS server, a frozen file system or a broken
disk blocks its caller indefinitely. A signing service may hang too. So daemon threads make such
calls (:class:`DeadlineExecutor`), and a caller waits for them until its deadline.
"""

from __future__ import annotations

# Import it before our hooks are registered. Then its lock, which a thread that we wait for may
# need, is taken after the wait: before a fork, hooks run in reverse order of registration.
import asyncio
import contextlib
import fcntl
import math
import os
import queue
import selectors
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from types import MethodType
from typing import Any, Literal, TypeAlias, TypeVar

from s3cache.errors import CircuitOpenError, TransientError
from s3cache.util.logs import logger_of
from s3cache.util.text import counted

# It registers a hook for the exit, which fails after the exit has begun.
with contextlib.suppress(RuntimeError):
    import concurrent.futures.thread  # noqa: F401

_T = TypeVar("_T")
_Call: TypeAlias = "tuple[Callable[[], Any], Future[Any], bool]"

# How long a fork waits. A thread may import from a slow disk, or need a lock that the forking
# thread holds.
LIMIT_S = 10.0
_LOOK_EVERY_S = 0.0001

# The number of concurrent calls, which bounds how many can hang.
_THREADS = 16
IDLE_S = 10.0  # an idle thread ends after this time; the last stays while there is a user
# After a call hung, a probe is made after this time.
PROBE_AFTER_S = 30.0
_PROBE_WAIT_S = 0.5

logger = logger_of()


_first_pid = os.getpid()


def is_forked() -> bool:
    """Return whether this process was forked after s3cache was imported, and lacks its threads."""
    return os.getpid() != _first_pid


def threads_are_greenlets() -> bool:
    """Return whether gevent has replaced threads: then all run in one system thread.

    Raises RuntimeError if it did so after this module was imported. The locks and selectors here
    are the system's: one waiting greenlet would block all others.
    """
    monkey = sys.modules.get("gevent.monkey")
    are_greenlets = monkey is not None and bool(monkey.is_module_patched("threading"))
    if are_greenlets and not _were_greenlets:
        raise RuntimeError(
            "gevent.monkey.patch_all() was called after s3cache was imported: call it first"
        )
    return are_greenlets


_were_greenlets = True
_were_greenlets = threads_are_greenlets()


# -- open files that are not shared

_descriptors: set[int] = set()
# Held during a fork: a child must know every descriptor that it inherits. Reentrant, because a
# signal handler may fork.
_mutex = threading.RLock()


def open_unshared(path: str, flags: int, *, dir_fd: int | None = None) -> int:
    """Open ``path``, a private file; every child that is forked later closes it at once."""
    # Without the lock: a hanging file system must not block forks by other threads.
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=dir_fd)
    with _mutex:
        _descriptors.add(fd)
    return fd


def close_unshared(fd: int) -> None:
    """Unlock and close a file of :func:`open_unshared`."""
    with contextlib.suppress(OSError):  # first, in case a child keeps an open copy
        fcntl.flock(fd, fcntl.LOCK_UN)
    with _mutex:
        _descriptors.discard(fd)
    os.close(fd)


def _close_in_child() -> None:
    for fd in _descriptors:
        with contextlib.suppress(OSError):
            os.close(fd)
    _descriptors.clear()
    _mutex.release()


os.register_at_fork(
    before=_mutex.acquire, after_in_parent=_mutex.release, after_in_child=_close_in_child
)


# -- code during which a fork waits

# Held during a fork. Reentrant, because a signal handler may fork during a fork of its thread.
_gate = threading.RLock()
_busy: set[int] = set()  # the threads to wait for


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop that delays fork() while a callback runs.

    A callback may hold a lock that the child would inherit locked. A fork by another thread waits
    for its end, at most 10 seconds.
    """
    return asyncio.SelectorEventLoop(_Selector())


class _Selector(selectors.DefaultSelector):
    """A selector that marks its thread as busy between two waits."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        _busy.discard(threading.get_ident())
        try:
            return super().select(timeout)
        finally:
            with _gate:
                _busy.add(threading.get_ident())

    def close(self) -> None:
        super().close()
        _busy.discard(threading.get_ident())


def _wait_for_others() -> None:
    mine, until = {threading.get_ident()}, time.monotonic() + LIMIT_S
    # Without a lock, because a child could inherit it locked.
    while _busy - mine and time.monotonic() < until:
        time.sleep(_LOOK_EVERY_S)


os.register_at_fork(
    before=_wait_for_others,
    after_in_child=lambda: _busy.intersection_update({threading.get_ident()}),
)
# Registered later, so taken earlier: no callback begins between the wait and the end of the fork.
# The functions are in C, so that an exception in a signal handler cannot leave the gate closed.
os.register_at_fork(
    before=_gate.acquire, after_in_parent=_gate.release, after_in_child=_gate.release
)


# -- state of a process

_renewals: list[Callable[[], Callable[[], None] | None]] = []


def call_in_child(renew: Callable[[], None]) -> None:
    """Call ``renew`` in every forked child, in the order of registration.

    A method is unregistered when its object is destroyed.
    """
    known = weakref.WeakMethod(renew) if isinstance(renew, MethodType) else lambda: renew
    with _mutex:  # held by the forking thread when the child is made
        _renewals[:] = [*(former for former in _renewals if former() is not None), known]


def _renew_in_child() -> None:
    for known in [*_renewals]:
        try:
            if (renew := known()) is not None:
                renew()
        except Exception:
            logger.exception("a forked child could not renew the state of its process")


# Last: these functions may start threads and open files.
os.register_at_fork(after_in_child=_renew_in_child)


# -- calls with a deadline


class DeadlineExecutor:
    """Makes calls on other threads, and waits for each until a deadline; any thread may use it.

    After a call that took longer, calls fail at once, until the hanging calls have ended, or an
    occasional probe succeeds. A nested call is made directly.

    Attributes:
        limit_s: how long a caller waits for a call; short enough for an exit within 10 s.
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
        """Return the shared executor of this process for ``path``, until :meth:`release`."""
        made = cls(f"the file system of {path}")
        executor = _executors.setdefault(path, made)
        if executor is not made:
            with executor._mutex:
                executor._users += 1
        return executor

    def release(self) -> None:
        """Let the last thread end too, if this was the last user."""
        with self._mutex:
            self._users -= 1

    def _begin(self) -> None:
        # A forked child has none of the parent's threads, and no hanging calls.
        self._mutex = threading.Lock()
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)  # the number of idle threads
        self._threads = 0
        self._hanging = 0
        self._breaker = Breaker(1, PROBE_AFTER_S)

    def call(self, work: Callable[[], _T], *, more_s: float = 0.0) -> _T:
        """Return the result of ``work``, or raise its error, within ``limit_s`` plus ``more_s``.

        Raises TransientError if it takes longer (``work`` continues), and CircuitOpenError if an
        earlier call hangs (``work`` was not called).
        """
        if getattr(self._current, "is_ours", False):
            return work()
        try:
            is_probe = self._breaker.enter()
        except CircuitOpenError as error:
            error.message = f"{self._name} hangs, and is not used until it answers"
            raise
        limit_s = _PROBE_WAIT_S if is_probe else self.limit_s + more_s
        if not self._has_thread():
            self._breaker.leave(is_probe)
            return work()
        answer: Future[_T] = Future()
        self._calls.put((work, answer, is_probe))
        try:
            return answer.result(limit_s)
        except FutureTimeoutError:  # ours, or raised by work
            return self._late(answer, is_probe, limit_s)
        finally:
            del answer  # avoid a cycle through its error's traceback

    async def run(self, work: Callable[[], _T], *, more_s: float = 0.0) -> _T:
        """Do the same as :meth:`call` without blocking the event loop."""
        if self._breaker.state != "closed" or not self._has_thread():
            return await asyncio.to_thread(self.call, work, more_s=more_s)
        answer: Future[_T] = Future()
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def end(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(ended.set_result, None)

        answer.add_done_callback(end)
        self._calls.put((work, answer, False))
        await asyncio.wait([ended], timeout=self.limit_s + more_s)
        try:
            return self._late(answer, False, self.limit_s + more_s)
        finally:
            del answer

    def _late(self, answer: Future[_T], is_probe: bool, limit_s: float) -> _T:
        """Return or raise the outcome of a call; if there is none, it hangs."""
        if not answer.cancel():
            return answer.result()
        with self._mutex:
            self._hanging += 1
            if self._hanging:  # else it has just ended
                self._breaker.fail(is_probe)
        raise TransientError(f"{self._name} has not answered within {limit_s:g} s") from None

    def _has_thread(self) -> bool:
        """Start a thread unless one is idle or there are enough; return whether there is any."""
        # At exit none can be started. Then a call waits for another thread: here it might hang.
        if self._idle.acquire(blocking=False):
            return True
        thread = threading.Thread(target=self._work, name="s3cache-deadline", daemon=True)
        with self._mutex, contextlib.suppress(RuntimeError):
            if self._threads < _THREADS:
                thread.start()
                self._threads += 1
        return self._threads > 0

    def _work(self) -> None:
        self._current.is_ours = True
        may_end = False
        while not may_end:
            # Without memory, a call may end late or not at all, but its caller does not wait long.
            with contextlib.suppress(MemoryError, SystemError):
                may_end = self._make_next()

    def _make_next(self) -> bool:
        """Make the next call; return whether there was none and this thread may end."""
        try:
            call = self._calls.get(timeout=IDLE_S)
        except queue.Empty:
            with self._mutex:
                # At the exit no other can be started. If it is not idle, a call is coming.
                may_end = self._threads > 1 or self._users <= 0
                may_end = may_end and self._idle.acquire(blocking=False)
                self._threads -= may_end
                return may_end
        work, answer, is_probe = call
        value = error = None
        try:
            value = work()
        except BaseException as exc:  # noqa: BLE001 - it is the caller's
            error = exc
        if is_probe:
            self._breaker.succeed(True)
        self._idle.release()  # before the caller goes on, so that its next call runs here
        try:
            if error is None:
                answer.set_result(value)
            else:
                answer.set_exception(error)
        except InvalidStateError:  # it was late
            with self._mutex:
                self._hanging -= 1
                if not self._hanging:
                    self._breaker.succeed(True)
        del call, answer, error  # avoid a cycle through the error's traceback
        return False


_executors: weakref.WeakValueDictionary[str, DeadlineExecutor] = weakref.WeakValueDictionary()

BreakerState: TypeAlias = Literal["closed", "open", "half-open"]


class Breaker:
    """Decides whether a call may be made; any thread may call any method.

    Closed: calls pass, and ``failures`` in a row open it. Open: no call passes for
    ``reset_after_s``. Half-open: exactly one call passes as a probe; its success closes the
    breaker, its failure opens it for the same time again. While the breaker is open, outcomes of
    calls that began before do not count.

    A call that passes :meth:`enter` ends with :meth:`succeed`, :meth:`fail` or, without an outcome
    (it was cancelled), :meth:`leave`. They take the result of ``enter``.
    """

    def __init__(
        self, failures: int, reset_after_s: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most_failures = failures
        self._reset_after_s = reset_after_s
        self._clock = clock
        self._mutex = threading.Lock()
        self._failures = 0
        self._open_until: float | None = None  # infinity during a probe

    @property
    def state(self) -> BreakerState:
        until = self._open_until
        if until is None:
            return "closed"
        return "half-open" if until == math.inf or self._clock() >= until else "open"

    def enter(self) -> bool:
        """Return whether the next call is a probe; raise CircuitOpenError if none may be made."""
        with self._mutex:
            if self._open_until is None:
                return False
            if (left_s := self._open_until - self._clock()) > 0:
                is_probed = left_s == math.inf
                when = "a probe is under way" if is_probed else f"next probe in {left_s:.1f} s"
                failures = counted(self._failures, "failure")
                raise CircuitOpenError(f"circuit open after {failures} in a row, {when}")
            self._open_until = math.inf
            return True

    def succeed(self, is_probe: bool) -> None:
        """End a call that was answered."""
        self._end(is_probe, failed=False)

    def fail(self, is_probe: bool = False) -> None:
        """End a call that failed; or count another failure, such as an abandoned wait."""
        self._end(is_probe, failed=True)

    def leave(self, is_probe: bool) -> None:
        """End a call without an outcome: the next call is the probe."""
        if is_probe:
            with self._mutex:
                self._open_until = self._clock()

    def _end(self, is_probe: bool, *, failed: bool) -> None:
        with self._mutex:
            if is_probe or self._open_until is None:
                self._failures = self._failures + 1 if failed else 0
                opens = failed and (is_probe or self._failures >= self._most_failures)
                self._open_until = self._clock() + self._reset_after_s if opens else None
