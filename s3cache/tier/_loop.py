"""Work in the background: one event loop on a thread of its own, and many downloads on it."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from s3cache.errors import ClosedError
from s3cache.store import AcceptSize, NotAccepted
from s3cache.util.logs import logger_of
from s3cache.util.threads import call_in_child, new_event_loop, threads_are_greenlets

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

__all__ = [
    "BackgroundLoop",
    "Budget",
    "Deadline",
    "Prefetch",
    "PrefetchReport",
    "Prefetches",
    "background",
    "before_exit",
    "cancel_all",
]

_T = TypeVar("_T")

_STOP_TIMEOUT_S = 2.0
_CANCEL_AGAIN_S = 0.1
_BREATHE_S = 0.01
_MOMENT_S = 0.1
# What an object takes while it arrives, in its own size, at most: the body, and pieces of it or
# what the allocator keeps of earlier ones (measured with benchmarks/storage.py).
_COPIES = 2

logger = logger_of("storage")


class BackgroundLoop:
    """An asyncio event loop on a daemon thread, started by the first call that needs it.

    Once :meth:`stop` was called, as the interpreter is exiting, all else raises ``ClosedError``.
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


# -- many transfers within the memory that they may take


class Budget:
    """Bytes that several transfers may hold at once. Used on one event loop only.

    A transfer that is alone may hold more than ``max_bytes``: otherwise it could never begin.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held = 0
        self._given = asyncio.Event()
        self._first = asyncio.Lock()

    async def take(self, size: int) -> None:
        """Wait until ``size`` bytes are free, and hold them; who waits longest comes first."""
        async with self._first:
            while not self.grow(0, size):
                await self._given.wait()

    def grow(self, held: int, size: int) -> bool:
        """Hold ``size`` bytes instead of ``held``, if so many are free; return whether they are."""
        others = self._held - held
        if others and others + size > self._max_bytes:
            return False
        self._held = others + size
        return True

    def give(self, size: int) -> None:
        """Free ``size`` bytes."""
        self._held -= size
        self._given.set()  # wakes all that wait now
        self._given.clear()


@dataclass(frozen=True, slots=True)
class PrefetchReport:
    """How far a prefetch is.

    Attributes:
        total: objects asked for.
        present: objects that were here already.
        found: objects fetched; ``size`` their bytes together.
        absent: objects that the remote does not have.
        failed: objects that could not be had; ``error`` is the last reason.
    """

    total: int
    present: int = 0
    found: int = 0
    size: int = 0
    absent: int = 0
    failed: int = 0
    error: Exception | None = None

    @property
    def complete(self) -> bool:
        return self.present + self.found + self.absent + self.failed == self.total


class Prefetch:
    """A prefetch under way. All methods may be called from any thread but the loop's own."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.future: concurrent.futures.Future[None] | None = None
        self._report = PrefetchReport(len(names))

    def report(self) -> PrefetchReport:
        """Return how far it is now."""
        return self._report

    def wait(self, timeout_s: float | None = None) -> PrefetchReport:
        """Wait for the end, at most ``timeout_s``; return how far it got. Raises nothing."""
        if self.future is not None:
            concurrent.futures.wait([self.future], timeout_s)
        return self._report

    def cancel(self) -> None:
        """Start no more downloads; those under way still land."""
        if self.future is not None:
            self.future.cancel()

    def count(self, *, error: Exception | None = None, **more: int) -> None:
        """Add finished objects to the report; called on the loop only."""
        counts = {name: getattr(self._report, name) + number for name, number in more.items()}
        self._report = replace(self._report, error=error or self._report.error, **counts)


class _Sized(Protocol):
    @property
    def size(self) -> int: ...


#: Fetches one object, if its size is accepted; ``None`` where there is none.
_Fetch: TypeAlias = Callable[[str, AcceptSize], Awaitable["_Sized | NotAccepted | None"]]


class Prefetches:
    """Fetches lists of objects on the background loop.

    Args:
        fetch: gets one object and lands it, unless its size is not accepted just now.
        concurrency: how many run at once.
        max_bytes: memory that they take together, unless a single one takes more.
        present: whether an object need not be fetched; called on a worker thread.
    """

    def __init__(
        self,
        loop: BackgroundLoop,
        fetch: _Fetch,
        *,
        concurrency: int,
        max_bytes: int,
        present: Callable[[str], bool],
    ) -> None:
        self._loop = loop
        self._fetch = fetch
        self._concurrency = concurrency
        self._present = present
        self.budget = Budget(max_bytes)
        self.running: set[asyncio.Task[None]] = set()  # touched on the loop only

    def start(self, names: Iterable[str]) -> Prefetch:
        """Fetch many objects in the background."""
        prefetch = Prefetch(list(dict.fromkeys(names)))
        prefetch.future = self._loop.submit(self._run(prefetch))
        return prefetch

    async def _run(self, prefetch: Prefetch) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.running.add(task)
        task.add_done_callback(self.running.discard)
        names = iter(prefetch.names)
        await asyncio.gather(*(self._work(prefetch, names) for _ in range(self._concurrency)))

    async def _work(self, prefetch: Prefetch, names: Iterator[str]) -> None:
        for name in names:
            with contextlib.suppress(Exception):  # fetching it says what is wrong
                if await asyncio.to_thread(self._present, name):
                    prefetch.count(present=1)
                    continue
            try:
                found = await self._fetch_one(name)
            except Exception as exc:  # noqa: BLE001 - whatever it is, the others go on
                prefetch.count(failed=1, error=exc)
            else:
                if found is None:
                    prefetch.count(absent=1)
                else:
                    prefetch.count(found=1, size=found.size)

    async def _fetch_one(self, name: str) -> _Sized | None:
        """Fetch an object within the budget: again, once there is memory, if it was too large."""
        held = 0

        def accept(size: int) -> bool:
            nonlocal held
            is_accepted = self.budget.grow(held, _COPIES * size)
            held = _COPIES * size if is_accepted else held
            return is_accepted

        try:
            while isinstance(answer := await self._fetch(name, accept), NotAccepted):
                self.budget.give(held)
                held = 0
                await self.budget.take(_COPIES * answer.size)
                held = _COPIES * answer.size
            return answer
        finally:
            self.budget.give(held)


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
