"""The remote store, and the background loop on which all that waits for the network happens."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from s3cache import entries, frame
from s3cache.entries import Replaceable
from s3cache.errors import (
    AccessDeniedError,
    ClosedError,
    DownloadTimeoutError,
    StoreError,
    TransientError,
    TruncatedError,
)
from s3cache.frame import Frame, Head, TrustCheck
from s3cache.settings import Settings
from s3cache.stats import Listeners, TransferEvent
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
from s3cache.tier._disk import DiskTier
from s3cache.tier._prefetch import Budget, Prefetch
from s3cache.tier._uploads import SMALL_BYTES, Uploads, cancel_all
from s3cache.util.logs import logger_of
from s3cache.util.threads import (
    Breaker,
    call_in_child,
    new_event_loop,
    threads_are_greenlets,
)

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    from s3cache.tier.claims import Waited
    from s3cache.tier.job import JobProfile
    from s3cache.tier.leases import Lease, Leases

_T = TypeVar("_T")

_STOP_TIMEOUT_S = 2.0
# What the requests for a lease may take, beside the time of waiting for others.
_LEASE_S = 30.0
_BREATHE_S, _MOMENT_S = 0.01, 0.1
# A server that was down is waited for so long; what comes later lands on the disk all the same.
_PROBE_WAIT_S = 0.5
# The signature of a larger entry is read first.
_USUAL_BYTES = 8 << 20
# A writer can put any number of objects under a key.
_LISTED_AT_MOST = 10_000

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

        Raise ``concurrent.futures.TimeoutError`` then, and ClosedError if what it needs was closed.
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

    def stop(self) -> None:
        """Cancel what runs and end the thread, waiting for it a few seconds at most."""
        with self._mutex:
            self._stopped = True
            if self._loop is None or self._thread is None:
                return
            with contextlib.suppress(RuntimeError):  # stopped before
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_TIMEOUT_S)
        # Have the interpreter exit without waiting for these threads: one may hang in a name lookup
        # or on a dead mount. They are daemons, as is the thread that started them, but
        # concurrent.futures joins what is in this private table all the same.
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
    # From this thread, a daemon: the worker is then one too, and no exit waits for it.
    with contextlib.suppress(RuntimeError):  # so late that there is none
        workers.submit(bool)
    ready.set()
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        with contextlib.suppress(Exception):
            loop.run_until_complete(cancel_all(asyncio.all_tasks(loop)))
            loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def _log_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log errors that no caller waits for, except a lack of memory, which their callers see."""
    if isinstance(context.get("exception"), MemoryError):
        time.sleep(_BREATHE_S)  # the loop tries again at once
    else:
        loop.default_exception_handler(context)


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
    """Call ``close`` at interpreter exit, while the loop still runs; return what undoes this."""
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


# -- the store


class RemoteTier:
    """The entries of one remote store, and all transfers between it and this process.

    Everything that waits for the network happens on the background loop. Methods may be called
    from any thread but the loop's own. What they need raises ``S3CacheError``.

    Args:
        store: the bare store; this object closes it.
        disk: where uploads are pending.
        present: which entries need not be fetched; called on worker threads, as ``land`` is.
        land: verifies an entry that was downloaded, and keeps it on this machine.
        replaceable: what an upload may overwrite.
        on_problem: called on the loop's thread with each error of an upload.
    """

    def __init__(
        self,
        store: Store,
        settings: Settings,
        *,
        disk: DiskTier | None,
        present: Callable[[list[str]], list[str]],
        land: Callable[[str, Buffer], Frame],
        check_trust: TrustCheck | None,
        replaceable: Replaceable,
        listeners: Listeners,
        on_problem: Callable[[Exception], None],
    ) -> None:
        self._store = store
        self._present, self._land, self._disk = present, land, disk
        self._check_trust = check_trust
        self._listeners = listeners
        self._replaceable = replaceable
        self._loop = background()
        #: Counts single requests to the store.
        self.metered = MeteredStore(store)
        reads, limit_s = settings.retry_policy, settings.upload_timeout_s
        writes = replace(reads, total_timeout_s=limit_s, attempt_timeout_s=limit_s)
        #: The circuit breaker before reads.
        self.breaker = Breaker(settings.breaker_failures, settings.breaker_reset_s)
        self._reader = BreakingStore(RetryingStore(self.metered, reads), self.breaker)
        # No breaker: what cannot be uploaded now is kept, and tried again after a pause.
        self._writer = RetryingStore(self.metered, writes)
        # Touched on the loop only.
        self._downloads: dict[str, asyncio.Task[Frame | NotAccepted | None]] = {}
        self._prefetches: set[asyncio.Task[Any]] = set()
        self._leases: Leases | None = None
        self._urgent, self._calm = 0, asyncio.Event()  # how many callers wait for the network
        self._stopped = False
        self._prefetch_concurrency = settings.download_concurrency
        self._budget = Budget(settings.prefetch_max_bytes)
        self.uploads = Uploads(
            self._loop,
            self._verify,
            self._publish,
            settings,
            disk=disk,
            listeners=listeners,
            on_problem=on_problem,
        )

    @property
    def url(self) -> str:
        return self._store.url

    def connect_soon(self) -> None:
        """Open the store's client in the background, so that the first call does not pay for it."""
        with contextlib.suppress(ClosedError):
            self._loop.submit(self._store.connect())  # the first real call meets the same error

    def load(self, name: str, timeout_s: float, *, suspect: bool = False) -> Frame | None:
        """Return the verified entry at ``name``, from a download under way if there is one.

        Where signatures matter, only the head of an entry that is large or ``suspect`` is read
        before they are checked. After ``timeout_s`` the download goes on, and lands.
        """
        return self._wait(self._load_verified(name, suspect=suspect), name, timeout_s)

    def names(self, key: str, timeout_s: float) -> list[str]:
        """List the names of all entries under ``key`` but the first, the newest first."""
        return self._wait(self._list(key), entries.name_prefix(key), timeout_s)

    def prefetch(self, names: Iterable[str]) -> Prefetch:
        """Fetch many objects in the background, except those that are on the disk."""
        prefetch = Prefetch(names)
        prefetch.future = self._loop.submit(self._prefetch(prefetch))
        return prefetch

    def follow(self, job: JobProfile) -> None:
        """Fetch what a profile of this program names, and see to it that ours is saved."""
        with contextlib.suppress(ClosedError):
            self._loop.submit(self._follow(job))

    def lease(self, key: str, bound_s: float) -> Waited:
        """Lease ``key`` for this machine, or wait for another one until its entry is there."""
        if self._leases is None:
            from s3cache.tier.leases import Leases, me

            self._leases = Leases(self._reader, me())
        work = self._leases.take(key, lambda: self._is_there(key), bound_s)
        return self._loop.wait(work, bound_s + _LEASE_S)

    def end_lease(self, lease: Lease, key: str, landed: bool) -> None:
        """End a lease in the background: once the entry is uploaded, if it has landed here."""
        with contextlib.suppress(ClosedError):
            self._loop.submit(self._end_lease(lease, key, landed))

    async def _end_lease(self, lease: Lease, key: str, landed: bool) -> None:
        self._cancel_at_stop()
        await lease.end((lambda: self._is_there(key)) if landed else None)

    async def _is_there(self, key: str) -> bool:
        return await self._reader.head(entries.first_name(key)) is not None

    def remove(self, prefix: str) -> list[str]:
        """Try to delete all objects with ``prefix``; return their names, or raise a failure."""
        return self._loop.wait(self._remove(prefix), None)

    def close(self, timeout_s: float) -> None:
        """Stop and release the connections; what is not uploaded stays pending."""
        end = time.monotonic() + timeout_s
        self.uploads.close(timeout_s)
        for work in (self._stop(), self._store.aclose()):
            with contextlib.suppress(Exception):
                self._loop.wait(work, max(end - time.monotonic(), _MOMENT_S))

    def _wait(self, work: Coroutine[Any, Any, _T], name: str, timeout_s: float) -> _T:
        # The server was down: do not wait long for the next probe.
        if self.breaker.state != "closed":
            timeout_s = min(timeout_s, _PROBE_WAIT_S)
        try:
            return self._loop.wait(work, timeout_s)
        except concurrent.futures.TimeoutError:
            # A try at a server that never answers takes minutes, longer than a caller waits.
            self.breaker.fail()  # and the try when it ends
            raise DownloadTimeoutError(
                f"no answer within {timeout_s:.3g} s", op="get", key=name
            ) from None

    # -- on the loop

    async def _load_verified(self, name: str, *, suspect: bool) -> Frame | None:
        """Download what a caller waits for, however much memory downloads take already."""
        if name in self._downloads:
            return await self._load_now(name, suspect=suspect)
        self._urgent += 1
        try:
            return await self._load_now(name, suspect=suspect)
        finally:
            self._urgent -= 1
            self._calm.set()  # wakes all that wait now
            self._calm.clear()

    async def _load_now(self, name: str, *, suspect: bool) -> Frame | None:
        if self._check_trust is not None:
            if not suspect:
                answer = await self._join(name, lambda size: size <= _USUAL_BYTES)
                if not isinstance(answer, NotAccepted):
                    return answer
            if await read_head(self._reader, name, self._check_trust) is None:
                return None
        while isinstance(answer := await self._join(name), NotAccepted):
            pass
        return answer

    async def _join(self, name: str, admit: AcceptSize | None = None) -> Frame | NotAccepted | None:
        """Return what the download of ``name`` gives; ``admit`` is asked if it begins now."""
        if self._stopped:
            raise ClosedError("the cache was closed")
        task = self._downloads.get(name)
        if task is None:
            task = self._downloads[name] = asyncio.ensure_future(self._download(name, admit))
            task.add_done_callback(lambda _: self._downloads.pop(name, None))
            # If every caller has gone, the error is not retrieved, which is no mistake.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait([task])  # unlike awaiting it, leaves it alone when cancelled
        return task.result()

    async def _download(self, name: str, admit: AcceptSize | None) -> Frame | NotAccepted | None:
        self._listeners.emit(TransferEvent("download", "started", name))
        try:
            data = await self._reader.get(name, admit)
            if isinstance(data, NotAccepted):  # it will be started again
                return data
            entry = None if data is None else await self._landed(name, data)
        except Exception as exc:
            self._listeners.emit(TransferEvent("download", "failed", name, error=exc))
            raise
        if entry is None:
            self._listeners.emit(TransferEvent("download", "absent", name))
        else:
            self._listeners.emit(TransferEvent("download", "done", name, entry.size))
        return entry

    async def _landed(self, name: str, data: Buffer) -> Frame:
        """Land what was downloaded, on another thread: if it is small, on one of the disk's."""
        if self._disk is not None and memoryview(data).nbytes <= SMALL_BYTES:
            with contextlib.suppress(TransientError):  # the disk hangs: then it is not kept
                return await self._disk.deadline.run(lambda: self._land(name, data))
        return await asyncio.to_thread(self._land, name, data)

    async def _prefetch(self, prefetch: Prefetch) -> None:
        self._cancel_at_stop()
        await prefetch.run(self._join, self._present, self._budget, self._prefetch_concurrency)

    async def _follow(self, job: JobProfile) -> None:
        self._cancel_at_stop()
        await job.follow(
            self._reader,
            self._check_trust,
            self._join_calmly,
            self._present,
            self._budget,
            self._prefetch_concurrency,
        )

    async def _join_calmly(self, name: str, admit: AcceptSize) -> Frame | NotAccepted | None:
        """Begin a download while no caller waits for another one."""
        while self._urgent:
            await self._calm.wait()
        return await self._join(name, admit)

    def _cancel_at_stop(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._prefetches.add(task)
        task.add_done_callback(self._prefetches.discard)

    async def _list(self, key: str) -> list[str]:
        first, prefix = entries.first_name(key), entries.name_prefix(key)
        present = []
        async for info in self._reader.list(prefix):
            if info.key.startswith(prefix):
                present.append(info)
            if len(present) >= _LISTED_AT_MOST:
                break
        present.sort(key=lambda info: info.modified, reverse=True)
        return [info.key for info in present if info.key != first]

    async def _remove(self, prefix: str) -> list[str]:
        listed = self._writer.list(prefix)
        names = [info.key async for info in listed if info.key.startswith(prefix)]
        for failure in await concurrently(self._try_delete, names):
            if failure is not None:
                raise failure
        return names

    async def _try_delete(self, name: str) -> StoreError | None:
        try:
            await self._writer.delete(name)
        except StoreError as exc:  # the others are deleted all the same
            return exc
        return None

    def _verify(self, name: str, data: Buffer, is_adopted: bool) -> Frame:
        # What this process saved is uploaded whether it trusts it or not: a job may sign for others
        # what it does not use. The signature of what others left is checked before it is parsed.
        return entries.verify(name, data, admit=self._check_trust if is_adopted else None)

    async def _publish(self, name: str, entry: Frame) -> bool:
        """Upload an entry; return whether it is given up."""
        is_profile = entry.header.key.startswith(entries.JOB_KEYS)
        try:
            written = await entries.publish(
                self._writer, entry, replaceable=self._replaceable, admit=self._check_trust
            )
        except AccessDeniedError:
            if not is_profile:
                raise
            return True  # no graph is lost where a job may only read
        if written and is_profile:
            from s3cache.tier.job import prune

            await prune(self._writer, entry.header.key)
        return False

    async def _stop(self) -> None:
        self._stopped = True
        for lease in [*self._leases.held] if self._leases is not None else ():
            lease.stop()
        await cancel_all([*self._prefetches, *self._downloads.values()])


async def read_head(store: Store, name: str, admit: TrustCheck | None = None) -> Head | None:
    """Return the verified header of an object; None where there is no object.

    It raises CorruptError if that is no entry, and UntrustedError if it is not admitted.
    """
    length = frame.HEADER_HINT_BYTES
    while True:
        data = await store.get_range(name, 0, length)
        if data is None:
            return None
        try:
            return frame.decode_head(data, admit=admit)
        except TruncatedError as exc:
            if exc.needed <= length:  # all of it is shorter
                raise
            length = exc.needed
