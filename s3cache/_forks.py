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
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["new_event_loop", "undivided"]

# A thread that takes longer, or needs a lock that the forking thread holds, is not waited for.
_PATIENCE_S = 1.0

_changed = threading.Condition()
_undivided: set[int] = set()
_forking: set[int] = set()


@contextmanager
def undivided() -> Iterator[None]:
    """A block that other threads do not fork amid, unless it takes longer than a second.

    Such blocks cannot be nested.
    """
    _enter()
    try:
        yield
    finally:
        _leave()


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A loop whose callbacks are undivided: forks happen while it waits for something."""
    return asyncio.SelectorEventLoop(_Selector())


class _Selector(selectors.DefaultSelector):
    """Its thread is amid something from the end of one wait to the beginning of the next."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        _leave()
        try:
            return super().select(timeout)
        finally:
            _enter()

    def close(self) -> None:
        super().close()
        _leave()


def _enter() -> None:
    me = threading.get_ident()
    with _changed:
        while _forking and me not in _forking:
            _changed.wait()
        _undivided.add(me)


def _leave() -> None:
    with _changed:
        _undivided.discard(threading.get_ident())
        _changed.notify_all()


def _before() -> None:
    me = threading.get_ident()
    with _changed:
        _forking.add(me)
        _changed.wait_for(lambda: _undivided <= {me}, _PATIENCE_S)


def _after_in_parent() -> None:
    with _changed:
        _forking.discard(threading.get_ident())
        _changed.notify_all()


def _after_in_child() -> None:
    global _changed
    _changed = threading.Condition()
    _undivided.intersection_update({threading.get_ident()})
    _forking.clear()


os.register_at_fork(
    before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child
)
