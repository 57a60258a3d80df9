"""Work in the background: one event loop on a thread of its own."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from s3cache.errors import ClosedError
from s3cache.util.forks import call_in_child, new_event_loop, threads_are_greenlets
from s3cache.util.logs import logger_of

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

__all__ = [
    "BackgroundLoop",
    "Deadline",
    "background",
    "before_exit",
    "cancel_all",
]

_T = TypeVar("_T")

_STOP_TIMEOUT_S = 2.0
_CANCEL_AGAIN_S = 0.1
_BREATHE_S = 0.01
_MOMENT_S = 0.1

logger = logger_of("storage")


class BackgroundLoop:
    """An asyncio event loop on a daemon thread, started by the first call that needs it.

    :meth:`submit`, :meth:`call` and :meth:`wait` raise :class:`~s3cache.errors.ClosedError` once
    :meth:`stop` was called: the interpreter is exiting.
    """

    def __init__(self) -> None:
        # Held while something is handed to the loop: whatever came before stop() is also cancelled
        # by it, so that no caller waits for a coroutine that will never run.
        self._mutex = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._workers: ThreadPoolExecutor | None = None
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
        """Return the result of a coroutine on the loop, which is cancelled after ``timeout_s``.

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
        """Cancel what runs and end the thread; stop waiting for it after ``timeout_s``."""
        with self._mutex:
            self._stopped = True
            if self._loop is None or self._thread is None:
                return
            with contextlib.suppress(RuntimeError):  # stopped before
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)
        if self._workers is not None:
            _abandon(self._workers)

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._stopped:
            raise ClosedError("the background thread was stopped: the interpreter is exiting")
        if self._loop is None:
            loop: asyncio.AbstractEventLoop | None = None
            try:
                loop = new_event_loop()
                loop.set_exception_handler(_log_error)
                threads_are_greenlets()  # or become so too late
                workers = _new_workers()
                loop.set_default_executor(workers)
                ready = threading.Event()
                thread = threading.Thread(
                    target=_run, args=(loop, workers, ready), name="s3cache", daemon=True
                )
                thread.start()
            except (RuntimeError, MemoryError, OSError) as exc:  # no more threads, or none so late
                if loop is not None:
                    loop.close()
                raise ClosedError(f"the background thread cannot be started: {exc}") from exc
            ready.wait()  # else the program may end, and the interpreter refuse the first worker
            self._loop, self._thread, self._workers = loop, thread, workers
        return self._loop


def _new_workers() -> ThreadPoolExecutor:
    """Make threads for files and name lookups, which still serve when no more can be started.

    From Python 3.12 none can once the interpreter exits, which is when the last uploads are waited
    for. What comes then waits for a thread that is there; the loop starts the first one early.

    Raises:
        RuntimeError: the interpreter exits, and what is needed was never imported.
    """
    from concurrent.futures.thread import ThreadPoolExecutor

    class Workers(ThreadPoolExecutor):
        def _adjust_thread_count(self) -> None:
            try:
                super()._adjust_thread_count()
            except RuntimeError:
                if not getattr(self, "_threads", ()):
                    raise

    return Workers(thread_name_prefix="s3cache")


def _abandon(workers: ThreadPoolExecutor) -> None:
    """Have the interpreter exit without waiting for these threads.

    One may hang in a name lookup or on a dead mount. They are daemons, as is the thread that
    started them, but concurrent.futures joins what is in this private table all the same.
    """
    queues = getattr(sys.modules.get("concurrent.futures.thread"), "_threads_queues", {})
    for thread in getattr(workers, "_threads", ()):
        queues.pop(thread, None)


def _run(
    loop: asyncio.AbstractEventLoop, workers: ThreadPoolExecutor, ready: threading.Event
) -> None:
    # From this thread, a daemon: the worker is then one too, and no exit waits for it.
    with contextlib.suppress(RuntimeError):  # so late that there is none
        workers.submit(bool)
    ready.set()
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        with contextlib.suppress(Exception):
            loop.run_until_complete(_cancel_everything())
            loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def _log_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log errors that no caller waits for, except a lack of memory, which their callers see."""
    if isinstance(context.get("exception"), MemoryError):
        time.sleep(_BREATHE_S)  # the loop tries again at once
    else:
        loop.default_exception_handler(context)


async def _cancel_everything() -> None:
    current = asyncio.current_task()
    await cancel_all(task for task in asyncio.all_tasks() if task is not current)


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
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
                task.exception()  # else it is logged


class Deadline:
    """When several steps are to be over together.

    Attributes:
        left_s: for the next step. A moment at least, in which it can begin.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return max(self._end - time.monotonic(), _MOMENT_S)


# -- one loop for the process

_current: BackgroundLoop | None = None
_mutex = threading.Lock()
_closers: list[Callable[[], None]] = []
# What a forked child inherits of its parent's loop is kept, unused: collecting it would close
# sockets and pollers that the two share.
_inherited: list[BackgroundLoop | None] = []


def background() -> BackgroundLoop:
    """Return this process's loop; a forked child has its own."""
    global _current
    with _mutex:
        if _current is None:
            _current = BackgroundLoop()
        return _current


def before_exit(close: Callable[[], None]) -> Callable[[], None]:
    """Call ``close`` at interpreter exit, while the loop still runs.

    Returns:
        A function that undoes this.
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
            logger.exception("closing at exit failed")
    # Even if it never ran: threads that outlive the main one must not start it now.
    background().stop()


def _forget_in_child() -> None:
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
with contextlib.suppress(RuntimeError):  # imported while the process ends: nothing runs any more
    _register(_at_exit)
call_in_child(_forget_in_child)
