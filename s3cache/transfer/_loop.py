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
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from s3cache._forks import new_event_loop
from s3cache.errors import ClosedError

__all__ = ["BackgroundLoop", "background", "before_exit", "cancelled"]

_T = TypeVar("_T")
_STOP_TIMEOUT_S = 2.0
_CANCEL_AGAIN_S = 0.1

logger = logging.getLogger("s3cache")


class BackgroundLoop:
    """An asyncio event loop on a daemon thread, started by the first call that needs it.

    :meth:`submit`, :meth:`call` and :meth:`wait` raise :class:`~s3cache.errors.ClosedError` once
    :meth:`stop` was called: the interpreter is exiting.
    """

    def __init__(self) -> None:
        # Held while something is handed to the loop: whatever came before stop() is also cancelled
        # by it, so nobody waits for a coroutine that will never run.
        self._mutex = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._executor = concurrent.futures.ThreadPoolExecutor(thread_name_prefix="s3cache")
        self._stopped = False

    def submit(self, work: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        """Run a coroutine on the loop."""
        try:
            with self._mutex:
                return asyncio.run_coroutine_threadsafe(work, self._started())
        except BaseException:
            work.close()
            raise

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Call a plain function on the loop, soon; in the order of the calls of one thread."""
        with self._mutex:
            self._started().call_soon_threadsafe(function, *args)

    def wait(self, work: Coroutine[Any, Any, _T], timeout_s: float | None) -> _T:
        """The result of a coroutine on the loop, which is cancelled after ``timeout_s``.

        Raises:
            concurrent.futures.TimeoutError: it took longer.
            ClosedError: it was cancelled, because something it needs was closed.
            RuntimeError: called on the loop's own thread, which would wait for itself.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError(
                "s3cache: called from its background thread, which would wait for itself for "
                "ever; a listener must hand such calls to another thread"
            )
        future = self.submit(work)
        try:
            return future.result(timeout_s)
        except concurrent.futures.CancelledError:
            raise ClosedError("closed while this call was waiting") from None
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise

    def stop(self, timeout_s: float = _STOP_TIMEOUT_S) -> None:
        """Cancel what runs and end the thread; gives up waiting after ``timeout_s``."""
        with self._mutex:
            self._stopped = True
            if self._loop is None or self._thread is None:
                return
            with contextlib.suppress(RuntimeError):  # stopped before
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)
        _abandon(self._executor)

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._stopped:
            raise ClosedError("the background thread was stopped: the interpreter is exiting")
        if self._loop is None:
            loop = new_event_loop()
            loop.set_default_executor(self._executor)
            thread = threading.Thread(target=_run, args=(loop,), name="s3cache", daemon=True)
            try:
                thread.start()
            except RuntimeError as exc:  # no more threads, or none so late
                loop.close()
                raise ClosedError(f"the background thread cannot be started: {exc}") from exc
            self._loop, self._thread = loop, thread
        return self._loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        with contextlib.suppress(Exception):
            loop.run_until_complete(_cancel_all())
            loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def _cancel_all() -> None:
    current = asyncio.current_task()
    await cancelled(task for task in asyncio.all_tasks() if task is not current)


async def cancelled(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the tasks and wait for their end."""
    left = {*tasks}
    while left:
        for task in left:
            task.cancel()
        # Once is not enough: before Python 3.12, asyncio.wait_for loses a cancellation that comes
        # with the result (https://github.com/python/cpython/issues/86296).
        done, left = await asyncio.wait(left, timeout=_CANCEL_AGAIN_S)
        for task in done:
            if not task.cancelled():
                task.exception()  # nobody else will ask for it


def _abandon(executor: concurrent.futures.ThreadPoolExecutor) -> None:
    """Have the interpreter exit without waiting for the executor's threads.

    One may hang in a name lookup or on a dead mount. They are daemons, as is the thread that
    started them, but concurrent.futures joins what is in this private table all the same.
    """
    queues = getattr(concurrent.futures.thread, "_threads_queues", {})
    for thread in getattr(executor, "_threads", ()):
        queues.pop(thread, None)


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
    # Even if it never ran: threads that outlive the main one must not start it now.
    background().stop()


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
