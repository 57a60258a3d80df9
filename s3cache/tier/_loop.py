"""The background loop, on which all network requests run."""

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
from s3cache.util.logs import logger_of
from s3cache.util.threads import call_in_child, new_event_loop, threads_are_greenlets

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

_T = TypeVar("_T")

_STOP_TIMEOUT_S = 2.0
_BREATHE_S = 0.01
_CANCEL_AGAIN_S = 0.1

logger = logger_of("storage")


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the tasks and wait for their end."""
    left = {*tasks}
    while left:
        for task in left:
            task.cancel()
        # Once is not enough: before Python 3.12, asyncio.wait_for loses a cancellation that arrives
        # together with the result (https://github.com/python/cpython/issues/86296).
        done, left = await asyncio.wait(left, timeout=_CANCEL_AGAIN_S)
        for task in done:
            if not task.cancelled():
                task.exception()  # retrieve it, else asyncio logs it


class BackgroundLoop:
    """An asyncio event loop on a daemon thread, started by the first call that needs it.

    After :meth:`stop`, which the interpreter's exit calls, all other methods raise ``ClosedError``.
    """

    def __init__(self) -> None:
        # Held while work is handed to the loop: stop() cancels all work that came before it, so no
        # caller waits for a coroutine that will never run.
        self._mutex = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._workers: ThreadPoolExecutor | None = None
        self._stopped = False

    def submit(self, work: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
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
        """Run a coroutine on the loop and return its result.

        After ``timeout_s`` cancel it and raise ``concurrent.futures.TimeoutError``. Raise
        ClosedError if it is cancelled because of a close.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError(
                "s3cache: called from its own background thread, which would wait for itself "
                "forever; a listener must hand such calls to another thread"
            )
        future = self.submit(work)
        try:
            return future.result(timeout_s)
        except concurrent.futures.CancelledError:
            raise ClosedError("closed while this call was waiting") from None
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise

    def stop(self) -> None:
        """Cancel all work and end the thread, waiting a few seconds at most."""
        with self._mutex:
            self._stopped = True
            if self._loop is None or self._thread is None:
                return
            with contextlib.suppress(RuntimeError):  # already stopped
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_TIMEOUT_S)
        # Let the interpreter exit without waiting for these threads: one may hang in a name lookup
        # or on a dead mount. They are daemons, like the thread that started them, but
        # concurrent.futures joins every thread in this private table.
        queues = getattr(sys.modules.get("concurrent.futures.thread"), "_threads_queues", {})
        for thread in getattr(self._workers, "_threads", ()):
            queues.pop(thread, None)

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._stopped:
            raise ClosedError("the background thread was stopped: the interpreter is exiting")
        if self._loop is None:
            loop: asyncio.AbstractEventLoop | None = None
            try:
                loop = new_event_loop()
                loop.set_exception_handler(_log_error)
                threads_are_greenlets()  # check now: a later patch by gevent would come too late
                workers = _new_workers()
                loop.set_default_executor(workers)
                ready = threading.Event()
                thread = threading.Thread(
                    target=_run, args=(loop, workers, ready), name="s3cache", daemon=True
                )
                thread.start()
            except (RuntimeError, MemoryError, OSError) as exc:  # too many threads, or at exit
                if loop is not None:
                    loop.close()
                raise ClosedError(f"the background thread cannot be started: {exc}") from exc
            ready.wait()  # at exit, the interpreter would refuse to start the first worker
            self._loop, self._thread, self._workers = loop, thread, workers
        return self._loop


def _new_workers() -> ThreadPoolExecutor:
    """Make a pool of threads for files and name lookups that works until the interpreter exits.

    From Python 3.12, no thread can start during the exit, when we wait for the last uploads. Work
    then waits for an existing thread; the loop starts the first one early.
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


def _run(
    loop: asyncio.AbstractEventLoop, workers: ThreadPoolExecutor, ready: threading.Event
) -> None:
    # This thread is a daemon, so the worker is one too, and the exit does not wait for it.
    with contextlib.suppress(RuntimeError):  # the interpreter is exiting
        workers.submit(bool)
    ready.set()
    asyncio.set_event_loop(loop)
    try:
        _run_until_stopped(loop)
    finally:
        with contextlib.suppress(Exception):
            loop.run_until_complete(cancel_all(asyncio.all_tasks(loop)))
            loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def _run_until_stopped(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop, and continue if it runs out of memory between two callbacks."""
    while not loop.is_closed():
        try:
            loop.run_forever()
            return
        except (MemoryError, SystemError):  # the latter if C code has lost the former
            while asyncio._get_running_loop() is loop:  # run_forever() could not reset this
                with contextlib.suppress(MemoryError):
                    asyncio._set_running_loop(None)
            time.sleep(_BREATHE_S)


def _log_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log errors that no caller waits for, except a lack of memory, which callers see."""
    if isinstance(context.get("exception"), MemoryError):
        time.sleep(_BREATHE_S)  # the loop would try again at once
    else:
        loop.default_exception_handler(context)


# -- one loop for the process

_current: BackgroundLoop | None = None
_mutex = threading.Lock()
_closers: list[Callable[[], None]] = []
# A forked child keeps the parent's loop unused: collecting it would close shared sockets and
# pollers.
_inherited: list[BackgroundLoop | None] = []


def background() -> BackgroundLoop:
    """Return the loop of this process; a forked child has its own."""
    global _current
    with _mutex:
        if _current is None:
            _current = BackgroundLoop()
        return _current


def before_exit(close: Callable[[], None]) -> Callable[[], None]:
    """Call ``close`` at interpreter exit, while the loop still runs; return the undo function."""
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
    # Even if it never ran: threads that outlive the main thread must not start it now.
    background().stop()


def _forget_in_child() -> None:
    global _current, _mutex
    _inherited.append(_current)
    _current = None
    _mutex = threading.Lock()
    _closers.clear()


# When atexit runs, concurrent.futures has already shut down the threads that the loop needs for
# files and name lookups. It uses a private hook, which runs last-in first-out: ours is registered
# after its import and runs first. Fall back to atexit if the hook is missing.
_register: Callable[[Callable[[], None]], object] = getattr(
    threading, "_register_atexit", atexit.register
)
with contextlib.suppress(RuntimeError):  # imported during the exit: no hook will run
    _register(_at_exit)
call_in_child(_forget_in_child)
