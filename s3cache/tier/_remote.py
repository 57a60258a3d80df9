"""The remote tier: transfers between one store and this process, on the background loop."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import functools
import itertools
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

from s3cache import entries, frame
from s3cache.entries import Replaceable
from s3cache.errors import (
    AccessDeniedError,
    ClosedError,
    CorruptError,
    DownloadTimeoutError,
    PermanentError,
    StoreError,
    TransientError,
    TruncatedError,
)
from s3cache.frame import Frame, Head, TrustCheck
from s3cache.seam import hints
from s3cache.settings import Settings
from s3cache.stats import Listeners
from s3cache.store import (
    AcceptSize,
    BreakingStore,
    Buffer,
    MeteredStore,
    NotAccepted,
    RetryingStore,
    Store,
    concurrently,
)
from s3cache.tier._disk import LocalTier
from s3cache.util.logs import logger_of
from s3cache.util.threads import (
    Breaker,
    call_in_child,
    new_event_loop,
    threads_are_greenlets,
)

_T = TypeVar("_T")

_STOP_TIMEOUT_S = 2.0
_BREATHE_S = 0.01
_CANCEL_AGAIN_S = 0.1
_MOMENT_S = 0.1
# How long to wait for a server that was down; a later answer still lands on the disk.
_PROBE_WAIT_S = 0.5
# For a larger entry, the signature is read first.
_USUAL_BYTES = 8 << 20
# Checking the digests of this many bytes costs no more than a thread switch.
SMALL_BYTES = 256 << 10
# How many listings without a name in a row show that the first names have not been removed.
_IN_VAIN = 16
# A limit on listings: a writer can put any number of objects under a key.
_LISTED_AT_MOST = 10_000

# Peak memory of a download, in multiples of its size: the body, and pieces of it or memory that the
# allocator keeps from earlier ones (measured with benchmarks/storage.py).
_COPIES = 2
# Memory reserved for a download until the typical size is known.
_EXPECTED_BYTES = _COPIES * (16 << 20)
# A search on the disk costs two thread switches, for one name or for this many.
_LOOKED_FOR_AT_ONCE = 32

logger = logger_of("storage")


# -- the background loop


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
        # Held while work is handed over: stop() cancels all that came before it, so no caller waits
        # for a coroutine that will never run.
        self._mutex = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._workers: Any = None
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
            problem = "called from its own background thread, which would wait for itself forever"
            raise RuntimeError(f"s3cache: {problem}; a listener must use another thread")
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
            with contextlib.ExitStack() as undo:
                try:
                    loop = new_event_loop()
                    undo.callback(loop.close)
                    loop.set_exception_handler(_log_error)
                    threads_are_greenlets()  # check now: a later patch by gevent comes too late
                    workers, ready = _new_workers(), threading.Event()
                    loop.set_default_executor(workers)
                    run = functools.partial(_run, loop, workers, ready)
                    thread = threading.Thread(target=run, name="s3cache", daemon=True)
                    thread.start()
                except (RuntimeError, MemoryError, OSError) as exc:  # too many threads, or at exit
                    raise ClosedError(f"the background thread cannot be started: {exc}") from exc
                undo.pop_all()
            ready.wait()  # at exit, the interpreter would refuse to start the first worker
            self._loop, self._thread, self._workers = loop, thread, workers
        return self._loop


def _new_workers() -> Any:
    """Make a pool of threads that works during the exit, when we wait for the last uploads."""
    # From Python 3.12, no thread can start then. Work waits for an existing one.
    from concurrent.futures.thread import ThreadPoolExecutor

    class Workers(ThreadPoolExecutor):
        def _adjust_thread_count(self) -> None:
            try:
                super()._adjust_thread_count()
            except RuntimeError:
                if not getattr(self, "_threads", ()):
                    raise

    return Workers(thread_name_prefix="s3cache")


def _run(loop: asyncio.AbstractEventLoop, workers: Any, ready: threading.Event) -> None:
    """Run the loop until it is stopped, also after a lack of memory between two callbacks."""
    # This thread is a daemon, so the worker is one too, and the exit does not wait for it.
    with contextlib.suppress(RuntimeError):  # the interpreter is exiting
        workers.submit(bool)
    ready.set()
    asyncio.set_event_loop(loop)
    try:
        while not loop.is_closed():
            try:
                loop.run_forever()
                break
            except (MemoryError, SystemError):  # the latter if C code has lost the former
                while asyncio._get_running_loop() is loop:  # run_forever() could not reset this
                    with contextlib.suppress(MemoryError):
                        asyncio._set_running_loop(None)
                time.sleep(_BREATHE_S)
    finally:
        with contextlib.suppress(Exception):
            loop.run_until_complete(cancel_all(asyncio.all_tasks(loop)))
            loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def _log_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log errors that no caller waits for, except a lack of memory, which callers see."""
    if isinstance(context.get("exception"), MemoryError):
        time.sleep(_BREATHE_S)  # the loop would try again at once
    else:
        loop.default_exception_handler(context)


# -- one loop for the process

_current: BackgroundLoop | None = None
_mutex = threading.Lock()
_closers: dict[object, Callable[[], object]] = {}
# A forked child keeps the parent's loop: collecting it would close shared sockets and pollers.
_inherited: list[BackgroundLoop | None] = []


def background() -> BackgroundLoop:
    """Return the loop of this process; a forked child has its own."""
    global _current
    with _mutex:
        if _current is None:
            _current = BackgroundLoop()
        return _current


def before_exit(close: Callable[[], object]) -> Callable[[], object]:
    """Call ``close`` at interpreter exit, while the loop still runs; return the undo function."""
    _closers[token := object()] = close
    return functools.partial(_closers.pop, token, None)


def _at_exit() -> None:
    for close in [*_closers.values()]:
        try:
            close()
        except Exception:
            logger.exception("closing at exit failed")
    # Even if it never ran: threads that outlive the main thread must not start it now.
    background().stop()


def _forget_in_child() -> None:
    global _current, _mutex
    _inherited.append(_current)
    _current, _mutex = None, threading.Lock()
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


# -- prefetches, within a budget of memory


class Budget:
    """A limit on the bytes that concurrent transfers hold. Used on one event loop only.

    A transfer that is alone may hold more than ``max_bytes``: otherwise it could never begin.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._held = 0
        self._given = asyncio.Event()

    async def take(self, size: int) -> None:
        """Wait until ``size`` bytes are free, and hold them."""
        while not self.grow(0, size):
            await self._given.wait()

    def grow(self, held: int, size: int) -> bool:
        """Hold ``size`` bytes instead of ``held``, if they are free; return whether they are."""
        others = self._held - held
        if others and others + size > self.max_bytes:
            return False
        self._held = others + size
        if size < held:
            self._given.set()  # wakes all current waiters
            self._given.clear()
        return True

    def give(self, size: int) -> None:
        self.grow(size, 0)


@dataclass(frozen=True, slots=True)
class PrefetchReport:
    """The progress of a prefetch of ``total`` objects.

    ``present`` were here already, ``found`` were fetched (``size`` bytes in all), ``absent`` are
    not in the remote, and ``failed`` could not be fetched; ``error`` is the last reason.
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


#: Fetches one object, if its size is accepted; ``None`` if there is none.
_Fetch: TypeAlias = "Callable[[str, AcceptSize], Awaitable[Frame | NotAccepted | None]]"


class Prefetch:
    """A running prefetch. All methods may be called from any thread but the loop's own."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = [*dict.fromkeys(names)]
        self.future: concurrent.futures.Future[None] | None = None
        self._expected = 0
        self._report = PrefetchReport(len(self.names))

    def report(self) -> PrefetchReport:
        """Return the current progress."""
        return self._report

    def wait(self, timeout_s: float | None = None) -> PrefetchReport:
        """Wait at most ``timeout_s`` for the end; return the progress."""
        if self.future is not None:
            concurrent.futures.wait([self.future], timeout_s)
        return self._report

    def cancel(self) -> None:
        """Start no more downloads; running ones still finish."""
        if self.future is not None:
            self.future.cancel()

    def count(self, *, error: Exception | None = None, **more: int) -> None:
        """Add finished objects to the report."""
        counts = {name: getattr(self._report, name) + number for name, number in more.items()}
        self._report = replace(self._report, error=error or self._report.error, **counts)

    async def run(
        self,
        fetch: _Fetch,
        present: Callable[[list[str]], list[str]],
        budget: Budget,
        concurrency: int,
    ) -> None:
        """Fetch all missing objects, as many at once as the budget allows; on the loop."""
        names, missing, looking = iter(self.names), list[str](), asyncio.Lock()
        # An object that exceeds the free memory is requested twice. To avoid that, reserve more
        # than the even share of the budget, but let at least half of the workers begin.
        self._expected = min(_EXPECTED_BYTES, 2 * budget.max_bytes // concurrency)

        async def next_missing() -> str | None:
            async with looking:
                while not missing and (some := [*itertools.islice(names, _LOOKED_FOR_AT_ONCE)]):
                    here: list[str] = []
                    with contextlib.suppress(Exception):  # the fetch will report the error
                        here = await asyncio.to_thread(present, some)
                    self.count(present=len(here))
                    missing.extend(name for name in reversed(some) if name not in here)
                return missing.pop() if missing else None

        async def work() -> None:
            while (name := await next_missing()) is not None:
                try:
                    size = await self._fetch_within(budget, fetch, name)
                except Exception as exc:  # noqa: BLE001 - whatever it is, the others go on
                    self.count(failed=1, error=exc)
                else:
                    self.count(found=size is not None, absent=size is None, size=size or 0)

        await asyncio.gather(*(work() for _ in range(concurrency)))

    async def _fetch_within(self, budget: Budget, fetch: _Fetch, name: str) -> int | None:
        """Fetch an object, again if it exceeds the free memory at first; return its size."""
        # Not the object: a worker would keep it in memory while it fetches the next.
        held = needed = 0

        def accept(size: int) -> bool:
            nonlocal held, needed
            needed = _COPIES * size
            if is_accepted := budget.grow(held, needed):
                held = needed
            return is_accepted

        try:
            expected = self._expected  # other workers may change it
            await budget.take(expected)
            held = expected
            while isinstance(answer := await fetch(name, accept), NotAccepted):
                budget.give(held)
                held = 0
                await budget.take(needed)
                held = needed
            self._expected = (self._expected + needed) // 2
            return None if answer is None else answer.size
        finally:
            budget.give(held)


# -- the tier


class RemoteTier:
    """The entries of one remote store, and all transfers between it and this process.

    All network requests run on the background loop. Methods may be called from any thread but the
    loop's own. Errors of requests are raised as ``S3CacheError``.

    Args:
        store: the bare store; this object closes it.
        local: where downloads land, and which entries need not be fetched.
        replaceable: the names that an upload may overwrite.
    """

    def __init__(
        self,
        store: Store,
        settings: Settings,
        listeners: Listeners,
        local: LocalTier,
        replaceable: Replaceable,
    ) -> None:
        self.store, self.url = store, store.url
        self._local, self.present, self.check_trust = local, local.present, local.check_trust
        self._listeners, self._replaceable = listeners, replaceable
        self.loop = background()
        #: Counts single requests to the store.
        self.metered = MeteredStore(store)
        reads, limit_s = settings.retry_policy, settings.upload_timeout_s
        writes = replace(reads, total_timeout_s=limit_s, attempt_timeout_s=limit_s)
        #: The circuit breaker before reads.
        self.breaker = Breaker(settings.breaker_failures, settings.breaker_reset_s)
        self.reader = BreakingStore(RetryingStore(self.metered, reads), self.breaker)
        # No breaker: a failed upload is kept, and tried again after a pause.
        self._writer = RetryingStore(self.metered, writes)
        # Used on the loop only.
        self._downloads: dict[str, asyncio.Task[Frame | NotAccepted | None]] = {}
        self._prefetches: set[asyncio.Task[Any]] = set()
        self.at_stop: list[Callable[[], object]] = []
        self._urgent, self._calm = 0, asyncio.Event()  # the number of callers that wait
        self._stopped = False
        self._may_save, self._in_vain = settings.mode == "read-write", 0
        self.concurrency = settings.download_concurrency
        self.budget = Budget(settings.prefetch_max_bytes)

    def load(self, name: str, timeout_s: float, *, suspect: bool = False) -> Frame | None:
        """Return the verified entry at ``name``; join a running download if there is one.

        If signatures are checked, only the head of a large or ``suspect`` entry is read before the
        check. After ``timeout_s`` the download continues and still lands on the disk.
        """
        return self._wait(self._load_verified(name, suspect=suspect), name, timeout_s)

    def names(self, key: str, timeout_s: float) -> list[str]:
        """List the names of all entries under ``key`` except the first name; newest first."""
        first, prefix = entries.first_name(key), entries.name_prefix(key)

        async def newest() -> list[str]:
            present = []
            async for info in self.reader.list(prefix):
                if info.key.startswith(prefix):
                    present.append(info)
                if len(present) >= _LISTED_AT_MOST:
                    break
            present.sort(key=lambda info: info.modified, reverse=True)
            return [info.key for info in present if info.key != first]

        return self._wait(newest(), prefix, timeout_s)

    def names_without_first(self, key: str, timeout_s: float) -> list[str]:
        """List the names under ``key`` although it lacks the first one, if some may exist.

        A rule that removes old objects removes the first name before the others, of many keys. But
        most keys without it have no entry. So a process that may save, and makes the other names
        visible again by that, gives up after some listings in vain, and any that may not list.
        """
        if self._in_vain >= _IN_VAIN:
            return []
        try:
            names = self.names(key, timeout_s)
        except StoreError as exc:  # the first name is absent, so this is not a failed lookup
            logger.debug("other entries under %s cannot be listed: %s", key, exc)
            self._in_vain = _IN_VAIN if isinstance(exc, PermanentError) else self._in_vain
            return []
        self._in_vain = 0 if names or not self._may_save else self._in_vain + 1
        return names

    def prefetch(self, names: Iterable[str]) -> Prefetch:
        """Fetch many objects in the background, except those that are on the disk."""
        prefetch = Prefetch(names)
        how = (self._join, self.present, self.budget, self.concurrency)
        prefetch.future = self.loop.submit(self._until_stop(lambda: prefetch.run(*how)))
        return prefetch

    def begin(self, work: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Run ``work`` on the loop in the background, until the tier is closed."""
        with contextlib.suppress(ClosedError):
            self.loop.submit(self._until_stop(work))

    async def has_entry(self, key: str) -> bool:
        """Return whether an entry under ``key`` is uploaded; on the loop."""
        return await self.reader.head(entries.first_name(key)) is not None

    def remove(self, prefix: str) -> list[str]:
        """Try to delete all objects with ``prefix``; return their names, or raise a failure."""

        failures: list[StoreError] = []

        async def delete(name: str) -> None:
            try:
                await self._writer.delete(name)
            except StoreError as exc:  # the others are still deleted
                failures.append(exc)

        async def delete_all() -> list[str]:
            listed = self._writer.list(prefix)
            names = [info.key async for info in listed if info.key.startswith(prefix)]
            await concurrently(delete, names)
            for failure in failures:
                raise failure
            return names

        return self.loop.wait(delete_all(), None)

    def discard(self, names: Iterable[str], digest: bytes, timeout_s: float) -> None:
        """Delete the entry with this digest under ``names``; raise StoreError if that fails."""

        async def discard() -> None:
            for name in names:
                data = await self._writer.get(name)
                with contextlib.suppress(CorruptError):
                    if data is not None and frame.decode_head(data).digest == digest:
                        await self._writer.delete(name)

        self._wait(discard(), "", timeout_s)

    def close(self, timeout_s: float) -> None:
        """Stop all downloads, and release the connections."""
        end = time.monotonic() + timeout_s
        for work in (self._stop(), self.store.aclose()):
            with contextlib.suppress(Exception):
                self.loop.wait(work, max(end - time.monotonic(), _MOMENT_S))

    def _wait(self, work: Coroutine[Any, Any, _T], name: str, timeout_s: float) -> _T:
        # The server was down: do not wait long for the next probe.
        if self.breaker.state != "closed":
            timeout_s = min(timeout_s, _PROBE_WAIT_S)
        try:
            return self.loop.wait(work, timeout_s)
        except concurrent.futures.TimeoutError:
            # A request to a server that never answers takes minutes, longer than a caller waits.
            self.breaker.fail()  # the request counts again when it ends
            problem = f"no answer within {timeout_s:.3g} s{self.store.via}"
            raise DownloadTimeoutError(problem, op="get", store=self.url, key=name) from None

    # -- on the loop

    async def _load_verified(self, name: str, *, suspect: bool) -> Frame | None:
        """Download an entry for a waiting caller, regardless of the memory budget."""
        is_new = name not in self._downloads
        self._urgent += is_new
        try:
            if self.check_trust is not None:
                if not suspect:
                    answer = await self._join(name, lambda size: size <= _USUAL_BYTES)
                    if not isinstance(answer, NotAccepted):
                        return answer
                if await read_head(self.reader, name, self.check_trust) is None:
                    return None
            while isinstance(answer := await self._join(name), NotAccepted):
                pass
            return answer
        finally:
            self._urgent -= is_new
            self._calm.set()  # wakes all current waiters
            self._calm.clear()

    async def _join(self, name: str, admit: AcceptSize | None = None) -> Frame | NotAccepted | None:
        """Return the result of the download of ``name``; a new one asks ``admit`` first."""
        if self._stopped:
            raise ClosedError("the cache was closed")
        task = self._downloads.get(name)
        if task is None:
            task = self._downloads[name] = asyncio.ensure_future(self._download(name, admit))
            task.add_done_callback(lambda _: self._downloads.pop(name, None))
            # Retrieve the error, in case no caller is left to do it.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait([task])  # unlike await, does not cancel the task if we are cancelled
        return task.result()

    async def _download(self, name: str, admit: AcceptSize | None) -> Frame | NotAccepted | None:
        emit = functools.partial(self._listeners.emit, "download")
        emit("started", name)
        try:
            data = await self.reader.get(name, admit)
            if isinstance(data, NotAccepted):  # the caller may start it again
                return data
            entry = None if data is None else await self._land(name, data)
        except Exception as exc:
            emit("failed", name, error=exc)
            raise
        emit("absent" if entry is None else "done", name, 0 if entry is None else entry.size)
        return entry

    async def _land(self, name: str, data: Buffer) -> Frame:
        """Land a download on another thread; a small one on a thread of the disk."""
        disk = self._local.disk
        if disk is not None and memoryview(data).nbytes <= SMALL_BYTES:
            with contextlib.suppress(TransientError):  # the disk hangs: do not keep it
                return await disk.deadline.run(lambda: self._local.land(name, data))
        return await asyncio.to_thread(self._local.land, name, data)

    async def _until_stop(self, work: Callable[[], Coroutine[Any, Any, object]]) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._prefetches.add(task)
        task.add_done_callback(self._prefetches.discard)
        await work()

    async def join_calmly(self, name: str, admit: AcceptSize) -> Frame | NotAccepted | None:
        """Begin a download when no caller waits for another one; on the loop."""
        while self._urgent:
            await self._calm.wait()
        return await self._join(name, admit)

    def verify(self, name: str, data: Buffer, is_adopted: bool) -> Frame:
        """Return an entry that is to be uploaded."""
        # Our own entries are uploaded even if we do not trust them: a job may sign entries for
        # other readers. The signature of an adopted entry is checked before it is parsed.
        return entries.verify(name, data, admit=self.check_trust if is_adopted else None)

    async def publish(self, name: str, entry: Frame) -> bool:
        """Upload an entry; return whether to give it up."""
        try:
            await entries.publish(
                self._writer, entry, replaceable=self._replaceable, admit=self.check_trust
            )
        except AccessDeniedError:
            if not entry.header.key.startswith(hints()):
                raise
            return True  # a process that may only read loses no graph by this
        return False

    async def _stop(self) -> None:
        self._stopped = True
        for stop in self.at_stop:
            stop()
        await cancel_all([*self._prefetches, *self._downloads.values()])


async def read_head(store: Store, name: str, admit: TrustCheck | None = None) -> Head | None:
    """Return the verified header of an object; None if there is no object.

    Raises CorruptError if the object is not an entry, and UntrustedError if it is not admitted.
    """
    length = frame.HEADER_HINT_BYTES
    while True:
        data = await store.get_range(name, length)
        if data is None:
            return None
        try:
            return frame.decode_head(data, admit=admit)
        except TruncatedError as exc:
            if exc.needed <= length:  # the object is shorter than its header
                raise
            length = exc.needed
