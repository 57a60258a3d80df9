"""A fork waits until no thread of ours is amid what a child could not live with.

The child has the forking thread only. Whatever lock another one held at that moment is locked in
the child for good: that of a module being imported, or one inside OpenSSL, which hangs whatever in
the child uses TLS or just exits, even if it knows nothing of this cache.
"""

from __future__ import annotations

# Before ours, so that its lock, which a thread that we wait for may need, is taken after the wait:
# what is registered first is called last before a fork.
import asyncio
import concurrent.futures.thread  # noqa: F401
import os
import selectors
import threading
import time

__all__ = ["new_event_loop"]

# A thread that takes longer, or needs a lock that the forking thread holds, is not waited for.
_PATIENCE_S = 1.0
_LOOK_EVERY_S = 0.0001

# Held by whoever forks. Reentrant, for a signal handler may fork while its thread does.
_gate = threading.RLock()
_undivided: set[int] = set()  # the threads to wait for


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A loop whose callbacks no other thread forks amid, but while it waits for something.

    A fork waits for them a second at most.
    """
    return asyncio.SelectorEventLoop(_Selector())


class _Selector(selectors.DefaultSelector):
    """Its thread is amid something from the end of one wait to the beginning of the next."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        _undivided.discard(threading.get_ident())
        try:
            return super().select(timeout)
        finally:
            with _gate:
                _undivided.add(threading.get_ident())

    def close(self) -> None:
        super().close()
        _undivided.discard(threading.get_ident())


def _wait_for_others() -> None:
    mine = {threading.get_ident()}
    end = time.monotonic() + _PATIENCE_S
    # Without a lock, which a child could inherit locked.
    while _undivided - mine and time.monotonic() < end:
        time.sleep(_LOOK_EVERY_S)


def _after_in_child() -> None:
    _undivided.intersection_update({threading.get_ident()})


os.register_at_fork(before=_wait_for_others, after_in_child=_after_in_child)
# Registered later, taken earlier: nobody begins anything from the wait to the end of the fork. The
# functions are in C, so that no exception of a signal's handler leaves the gate closed.
os.register_at_fork(
    before=_gate.acquire, after_in_parent=_gate.release, after_in_child=_gate.release
)
