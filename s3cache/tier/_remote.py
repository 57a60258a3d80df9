"""The remote tier: transfers between one store and this process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any, TypeVar

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
from s3cache.tier._loop import background, cancel_all
from s3cache.tier._prefetch import Budget, Prefetch
from s3cache.tier._uploads import SMALL_BYTES, Uploads
from s3cache.util.logs import logger_of
from s3cache.util.threads import Breaker

_T = TypeVar("_T")

_MOMENT_S = 0.1
# How long to wait for a server that was down; a later answer still lands on the disk.
_PROBE_WAIT_S = 0.5
# For a larger entry, the signature is read first.
_USUAL_BYTES = 8 << 20
# How many listings without a name in a row show that the first names have not been removed.
_IN_VAIN = 16
# A limit on listings: a writer can put any number of objects under a key.
_LISTED_AT_MOST = 10_000

logger = logger_of("storage")


class RemoteTier:
    """The entries of one remote store, and all transfers between it and this process.

    All network requests run on the background loop. Methods may be called from any thread but the
    loop's own. Errors of requests are raised as ``S3CacheError``.

    Args:
        store: the bare store; this object closes it.
        disk: where uploads are pending.
        present: returns the entries that need not be fetched; called on worker threads, like
            ``land``.
        land: verifies a downloaded entry, and keeps it on this machine.
        replaceable: the names that an upload may overwrite.
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
        self._land, self._disk = land, disk
        self.present, self.check_trust = present, check_trust
        self._listeners = listeners
        self._replaceable = replaceable
        self._loop = background()
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
        self.uploads = Uploads(
            self._loop,
            self._verify,
            self._publish,
            settings,
            disk=disk,
            listeners=listeners,
            on_problem=on_problem,
            before_flush=store.forget_failures,
        )

    @property
    def url(self) -> str:
        return self._store.url

    def connect_soon(self) -> None:
        """Open the store's client in the background, to make the first call faster."""
        with contextlib.suppress(ClosedError):
            self._loop.submit(self._store.connect())  # the first real call reports an error

    def load(self, name: str, timeout_s: float, *, suspect: bool = False) -> Frame | None:
        """Return the verified entry at ``name``; join a running download if there is one.

        If signatures are checked, only the head of a large or ``suspect`` entry is read before the
        check. After ``timeout_s`` the download continues and still lands on the disk.
        """
        return self._wait(self._load_verified(name, suspect=suspect), name, timeout_s)

    def names(self, key: str, timeout_s: float) -> list[str]:
        """List the names of all entries under ``key`` except the first name; newest first."""
        return self._wait(self._list(key), entries.name_prefix(key), timeout_s)

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
        prefetch.future = self._loop.submit(self._prefetch(prefetch))
        return prefetch

    def begin(self, work: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Run ``work`` on the loop in the background, until the tier is closed."""
        with contextlib.suppress(ClosedError):
            self._loop.submit(self._until_stop(work))

    def run(self, work: Coroutine[Any, Any, _T], timeout_s: float) -> _T:
        """Run ``work`` on the loop and return its result."""
        return self._loop.wait(work, timeout_s)

    async def has_entry(self, key: str) -> bool:
        """Return whether an entry under ``key`` is uploaded; on the loop."""
        return await self.reader.head(entries.first_name(key)) is not None

    def remove(self, prefix: str) -> list[str]:
        """Try to delete all objects with ``prefix``; return their names, or raise a failure."""
        return self._loop.wait(self._remove(prefix), None)

    def discard(self, names: Iterable[str], digest: bytes, timeout_s: float) -> None:
        """Delete the entry with this digest under ``names``.

        Raises:
            StoreError: the remote does not allow it, or does not answer within ``timeout_s``.
        """
        self._wait(self._discard(names, digest), "", timeout_s)

    def close(self, timeout_s: float) -> None:
        """Stop and release the connections; unfinished uploads stay pending."""
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
            # A request to a server that never answers takes minutes, longer than a caller waits.
            self.breaker.fail()  # the request counts again when it ends
            raise DownloadTimeoutError(
                f"no answer within {timeout_s:.3g} s{self._store.via}",
                op="get",
                store=self.url,
                key=name,
            ) from None

    # -- on the loop

    async def _load_verified(self, name: str, *, suspect: bool) -> Frame | None:
        """Download an entry for a waiting caller, regardless of the memory budget."""
        if name in self._downloads:
            return await self._load_now(name, suspect=suspect)
        self._urgent += 1
        try:
            return await self._load_now(name, suspect=suspect)
        finally:
            self._urgent -= 1
            self._calm.set()  # wakes all current waiters
            self._calm.clear()

    async def _load_now(self, name: str, *, suspect: bool) -> Frame | None:
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
        self._listeners.emit(TransferEvent("download", "started", name))
        try:
            data = await self.reader.get(name, admit)
            if isinstance(data, NotAccepted):  # the caller may start it again
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
        """Land a download on another thread; a small one on a thread of the disk."""
        if self._disk is not None and memoryview(data).nbytes <= SMALL_BYTES:
            with contextlib.suppress(TransientError):  # the disk hangs: do not keep it
                return await self._disk.deadline.run(lambda: self._land(name, data))
        return await asyncio.to_thread(self._land, name, data)

    async def _prefetch(self, prefetch: Prefetch) -> None:
        self._cancel_at_stop()
        await prefetch.run(self._join, self.present, self.budget, self.concurrency)

    async def _until_stop(self, work: Callable[[], Coroutine[Any, Any, object]]) -> None:
        self._cancel_at_stop()
        await work()

    async def join_calmly(self, name: str, admit: AcceptSize) -> Frame | NotAccepted | None:
        """Begin a download when no caller waits for another one; on the loop."""
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
        async for info in self.reader.list(prefix):
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

    async def _discard(self, names: Iterable[str], digest: bytes) -> None:
        for name in names:
            data = await self._writer.get(name)
            with contextlib.suppress(CorruptError):
                if data is not None and frame.decode_head(data).digest == digest:
                    await self._writer.delete(name)

    async def _try_delete(self, name: str) -> StoreError | None:
        try:
            await self._writer.delete(name)
        except StoreError as exc:  # the others are still deleted
            return exc
        return None

    def _verify(self, name: str, data: Buffer, is_adopted: bool) -> Frame:
        # Our own entries are uploaded even if we do not trust them: a job may sign entries for
        # other readers. The signature of an adopted entry is checked before it is parsed.
        return entries.verify(name, data, admit=self.check_trust if is_adopted else None)

    async def _publish(self, name: str, entry: Frame) -> bool:
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
        data = await store.get_range(name, 0, length)
        if data is None:
            return None
        try:
            return frame.decode_head(data, admit=admit)
        except TruncatedError as exc:
            if exc.needed <= length:  # the object is shorter than its header
                raise
            length = exc.needed
