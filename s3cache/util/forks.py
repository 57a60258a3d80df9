"""Make forks safe: no inherited lock stays locked, no open file is shared, nothing is used twice.

A lock that another thread held at the fork stays locked in the child: that of a module being
imported, or one inside OpenSSL, which hangs any use of TLS and the exit. So a fork waits until no
thread of ours is inside such code (:func:`new_event_loop`).

A ``flock`` belongs to the open file: it would outlive the parent as long as the child keeps its
copy. So the child closes what :func:`open_unshared` opened.

All else that belongs to one process is replaced in the child (:func:`call_in_child`).
"""

from __future__ import annotations

# Imported before our hooks are registered, so that its lock, which a thread that we wait for may
# need, is taken after the wait: what is registered first is called last before a fork.
import asyncio
import contextlib
import fcntl
import os
import selectors
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import MethodType

from s3cache.util.logs import logger_of

# It registers a hook for the exit, which is refused once the exit has begun.
with contextlib.suppress(RuntimeError):
    import concurrent.futures.thread  # noqa: F401

__all__ = [
    "call_in_child",
    "close_unshared",
    "new_event_loop",
    "open_unshared",
    "threads_are_greenlets",
]

# A thread may import from a slow disk; or it may need a lock that the forking thread holds.
LIMIT_S = 10.0
_LOOK_EVERY_S = 0.0001

logger = logger_of()


def threads_are_greenlets() -> bool:
    """Return whether gevent has replaced threads: all of them are one to the system then.

    Raises:
        RuntimeError: it did so after this module was imported, with locks and selectors of the
            system: one greenlet that waits would stop all.
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
_forks = 0  # of this process, begun so far
# Held during a fork: a child must know every descriptor that it got. Reentrant, as a signal handler
# may fork.
_mutex = threading.RLock()


def open_unshared(path: str, flags: int, *, dir_fd: int | None = None) -> int:
    """Open ``path``, a private file; every child forked from now on closes it at once."""
    while True:
        # Without the lock: a file system that hangs must not keep other threads from forking.
        forks = _forks
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=dir_fd)
        with _mutex:
            if forks == _forks:
                _descriptors.add(fd)
                return fd
        os.close(fd)  # a child may have it, and not know: nothing was locked through it


def close_unshared(fd: int) -> None:
    """Unlock and close what :func:`open_unshared` opened."""
    with contextlib.suppress(OSError):  # before a child can keep a copy that is not closed
        fcntl.flock(fd, fcntl.LOCK_UN)
    with _mutex:
        _descriptors.discard(fd)
    os.close(fd)


def _begin_fork() -> None:
    global _forks
    _mutex.acquire()
    _forks += 1


def _close_in_child() -> None:
    for fd in _descriptors:
        with contextlib.suppress(OSError):
            os.close(fd)
    _descriptors.clear()
    _mutex.release()


os.register_at_fork(
    before=_begin_fork, after_in_parent=_mutex.release, after_in_child=_close_in_child
)


# -- code that a fork waits for

# Held during a fork. Reentrant, as a signal handler may fork while its thread does.
_gate = threading.RLock()
_busy: set[int] = set()  # the threads to wait for


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop that delays fork() while a callback runs.

    A callback may hold a lock that the child would inherit locked. A fork by another thread waits
    for its end, 10 seconds at most.
    """
    return asyncio.SelectorEventLoop(_Selector())


class _Selector(selectors.DefaultSelector):
    """Mark the thread as busy from the end of one wait to the beginning of the next."""

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
    # Without a lock, which a child could inherit locked.
    while _busy - mine and time.monotonic() < until:
        time.sleep(_LOOK_EVERY_S)


def _after_in_child() -> None:
    _busy.intersection_update({threading.get_ident()})


os.register_at_fork(before=_wait_for_others, after_in_child=_after_in_child)
# Registered later, taken earlier: no callback begins from the wait to the end of the fork. The
# functions are in C, so that no exception of a signal handler leaves the gate closed.
os.register_at_fork(
    before=_gate.acquire, after_in_parent=_gate.release, after_in_child=_gate.release
)


# -- what belongs to one process

_renewals: list[Callable[[], Callable[[], None] | None]] = []


def call_in_child(renew: Callable[[], None]) -> None:
    """Have ``renew`` called in each forked child, in the order of these calls.

    A method is forgotten together with its object.
    """
    known = weakref.WeakMethod(renew) if isinstance(renew, MethodType) else lambda: renew
    with _mutex:  # held by the forking thread when the child is made
        _renewals[:] = [*(former for former in _renewals if former() is not None), known]


def _renew_in_child() -> None:
    for known in [*_renewals]:
        renew = known()
        try:
            if renew is not None:
                renew()
        except Exception:
            logger.exception("a forked child could not renew what belongs to one process")


# Last: these functions may start threads and open files.
os.register_at_fork(after_in_child=_renew_in_child)
