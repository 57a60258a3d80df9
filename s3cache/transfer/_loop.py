"""The one background thread of the process, and the event loop on it."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import concurrent.futures.thread
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from s3cache.errors import ClosedError

__all__ = ["BackgroundLoop", "background", "before_exit"]

_T = TypeVar("_T")
_STOP_TIMEOUT_S = 2.0

logger = logging.getLogger("s3cache")


class BackgroundLoop:
    """An asyncio event loop on a daemon thread, started by the first call that needs it.

    All methods may be called from any thread but the loop's own.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopped = False

    def start(self) -> asyncio.AbstractEventLoop:
        """The running loop.

        Raises:
            ClosedError: :meth:`stop` was called: the interpreter is exiting.
        """
        with self._mutex:
            if self._stopped:
                raise ClosedError("the background loop was stopped: the interpreter is exiting")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_run, args=(self._loop,), name="s3cache", daemon=True
                )
                self._thread.start()
            return self._loop

    def submit(self, work: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        """Run a coroutine on the loop; its future may be waited for on this thread."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self.start())
        except BaseException:
            work.close()
            raise

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Call a plain function on the loop, soon."""
        self.start().call_soon_threadsafe(function, *args)

    def on_this_thread(self) -> bool:
        """Whether the caller is on the loop's own thread, where waiting for it would hang."""
        return threading.current_thread() is self._thread

    def stop(self, timeout_s: float = _STOP_TIMEOUT_S) -> None:
        """Cancel what runs and end the thread; gives up waiting after ``timeout_s``."""
        with self._mutex:
            self._stopped = True
            loop, thread = self._loop, self._thread
        if loop is None or thread is None or not thread.is_alive():
            return
        with contextlib.suppress(RuntimeError):  # it ended by itself meanwhile
            loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout_s)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        with contextlib.suppress(Exception):
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


_current: BackgroundLoop | None = None
_mutex = threading.Lock()
_closers: list[Callable[[], None]] = []
# What a forked child inherits of its parent's loop is kept, unused: collecting it would close
# sockets and pollers that the two share.
_inherited: list[BackgroundLoop | None] = []


def background() -> BackgroundLoop:
    """This process's loop; a forked child has its own."""
    global _current
    with _mutex:
        if _current is None:
            _current = BackgroundLoop()
        return _current


def before_exit(close: Callable[[], None]) -> Callable[[], None]:
    """Have ``close`` called at interpreter exit while the loop still runs.

    Returns:
        A function that takes this back.
    """
    _closers.append(close)

    def forget() -> None:
        with contextlib.suppress(ValueError):
            _closers.remove(close)

    return forget


def _at_exit() -> None:
    for close in list(_closers):
        try:
            close()
        except Exception:
            logger.exception("s3cache: closing at exit failed")
    if _current is not None:
        _current.stop()


def _after_fork_in_child() -> None:
    global _current, _mutex
    _inherited.append(_current)
    _current = None
    _mutex = threading.Lock()
    _closers.clear()


# By the time atexit runs, concurrent.futures has shut its threads down, which the loop needs for
# files and name lookups. The hook it does that with runs last-in first-out, so ours, registered
# after it was imported, comes first. The hook is private: have something to fall back on.
_register: Callable[[Callable[[], None]], object] = getattr(
    threading, "_register_atexit", atexit.register
)
_register(_at_exit)
os.register_at_fork(after_in_child=_after_fork_in_child)
