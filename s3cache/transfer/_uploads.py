"""Uploads: acknowledged at once, done later, and not forgotten if the process dies."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from s3cache.errors import ClosedError, CorruptError, NoSpaceError, S3CacheError, TransientError
from s3cache.store._base import Buffer
from s3cache.tier import LocalTier
from s3cache.transfer._events import Listeners, Step, TransferEvent
from s3cache.transfer._loop import BackgroundLoop

__all__ = ["FlushReport", "UploadLimits", "Uploads"]

# After a failure that may pass, uploads pause this long, twice as long after the next one.
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
# How often a process looks for what its dead neighbours have left.
_ADOPT_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class UploadLimits:
    """What uploads may take.

    Attributes:
        concurrency: uploads at once.
        max_count: objects queued. More are picked up later from their records.
        max_bytes: payload held in memory at once; one object larger than that goes alone.
    """

    concurrency: int
    max_count: int
    max_bytes: int


@dataclass(frozen=True, slots=True)
class FlushReport:
    """What remains to be uploaded after a flush.

    Attributes:
        remaining: objects not uploaded yet. Those with a record in the local tier are found
            again by a later process.
        in_memory: how many of them have no record and die with this process.
        error: why the last failed upload failed, if any did since the last success.
    """

    remaining: int
    in_memory: int
    error: Exception | None

    @property
    def complete(self) -> bool:
        return self.remaining == 0


class Uploads:
    """The upload queue of one namespace.

    Objects come with a record in the local tier, which holds their bytes, or without a tier as
    bytes in memory. :meth:`put` and :meth:`put_in_memory` never wait for the network.

    Args:
        publish: uploads the bytes of one object.
        tier: holds bytes and records; ``None`` if there is no local tier.
        namespace: prefix of the names that are ours.
        on_problem: told, on the loop's thread, of each error that ends an attempt.
    """

    def __init__(
        self,
        loop: BackgroundLoop,
        publish: Callable[[Buffer], Awaitable[None]],
        *,
        tier: LocalTier | None,
        namespace: str,
        limits: UploadLimits,
        listeners: Listeners,
        on_problem: Callable[[Exception], None],
    ) -> None:
        self._loop = loop
        self._publish = publish
        self._tier = tier
        self._namespace = namespace
        self._limits = limits
        self._listeners = listeners
        self._on_problem = on_problem

        # Touched on the loop only.
        self._queue: deque[str] = deque()
        self._sizes: dict[str, int] = {}  # of all that is queued or active
        self._active: set[str] = set()
        self._again: set[str] = set()  # replaced while active
        self._parked: set[str] = set()  # given up until a flush or a later process
        self._workers: list[asyncio.Task[None]] = []
        self._waiters: list[asyncio.Future[None]] = []
        self._overflowed = False
        self._pause_s = 0.0
        self._resume_at = 0.0
        self._error: Exception | None = None

        # Bytes without a record; admitted on the caller's thread, removed on the loop.
        self._memory_lock = threading.Lock()
        self._memory: dict[str, Buffer] = {}
        self._memory_bytes = 0

        # Held while an object and its record change together. The version tells the end of an
        # upload that the object was replaced while it was under way.
        self._record_lock = threading.Lock()
        self._versions: Counter[str] = Counter()

    # -- on the caller's thread

    def start(self) -> None:
        """Begin to upload what processes that are gone have left, now and from time to time."""
        if self._tier is not None:
            self._loop.submit(self._adopt_regularly(self._tier))

    def put(self, tier: LocalTier, name: str, data: Buffer) -> None:
        """Write the object to the local tier, record it as pending, and queue it.

        Raises:
            StoreError: the local tier could not take it; nothing was queued.
        """
        with self._record_lock:
            self._versions[name] += 1
            tier.put_pending(name, data)
        with contextlib.suppress(ClosedError):  # at interpreter exit: a later process uploads it
            self._loop.call(self._accept, name, memoryview(data).nbytes)

    def put_in_memory(self, name: str, data: Buffer) -> None:
        """Queue the object's bytes, which die with the process.

        Raises:
            NoSpaceError: the queue is full.
        """
        size = memoryview(data).nbytes
        with self._memory_lock:
            old = self._memory.get(name)
            total = self._memory_bytes + size - (0 if old is None else memoryview(old).nbytes)
            if total > self._limits.max_bytes or len(self._memory) >= self._limits.max_count:
                raise NoSpaceError(
                    f"the upload queue is full: {len(self._memory)} objects of "
                    f"{self._memory_bytes} bytes wait in memory",
                    op="put",
                    key=name,
                )
            self._memory[name] = data
            self._memory_bytes = total
        self._loop.call(self._accept, name, size)

    @property
    def pending(self) -> int:
        """How many uploads are queued, under way or given up for now; may be a moment old."""
        return len(self._sizes) + len(self._parked)

    def flush(self, timeout_s: float | None) -> FlushReport:
        """Wait until nothing is left that can be uploaded, at most ``timeout_s``.

        What was given up is tried once more, and a pause after a failure is cut short.
        """
        return self._wait_for(self._drain(), timeout_s)

    def flush_while_it_works(self, timeout_s: float) -> FlushReport:
        """Like :meth:`flush`, but end where uploads pause after a failure: for the exit."""
        return self._wait_for(self._until(lambda: self._idle() or self._pausing()), timeout_s)

    def _wait_for(self, work: Coroutine[Any, Any, None], timeout_s: float | None) -> FlushReport:
        future = self._loop.submit(work)
        try:
            future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            future.cancel()
        return self._loop.submit(self._report()).result()

    def close(self) -> None:
        """Stop uploading. Records stay, for :meth:`LocalTier.close` to leave to others."""
        with contextlib.suppress(ClosedError):
            self._loop.submit(self._stop()).result()

    # -- on the loop: the queue

    async def _report(self) -> FlushReport:
        known = {*self._sizes, *self._parked}
        if self._tier is not None:
            with contextlib.suppress(S3CacheError):
                known.update(await asyncio.to_thread(self._tier.pending, self._namespace))
        return FlushReport(len(known), len(self._memory), self._error)

    def _accept(self, name: str, size: int) -> None:
        self._parked.discard(name)
        if name in self._active:
            self._again.add(name)
        elif name not in self._sizes:
            if len(self._queue) >= self._limits.max_count and name not in self._memory:
                self._overflowed = True  # its record stays
                return
            self._sizes[name] = size
            self._queue.append(name)
            self._listeners.emit(TransferEvent("upload", "queued", name, size))
        if not self._workers:
            self._workers = [
                asyncio.ensure_future(self._work()) for _ in range(self._limits.concurrency)
            ]
        self._wake()

    async def _drain(self) -> None:
        if self._tier is not None:
            await self._adopt(self._tier)
        for name in [*self._parked]:
            self._accept(name, 0)
        self._resume_at = 0.0
        self._wake()
        await self._until(self._idle)

    async def _stop(self) -> None:
        workers, self._workers = self._workers, []
        for task in workers:
            task.cancel()
        await asyncio.gather(*workers, return_exceptions=True)

    def _idle(self) -> bool:
        return not (self._queue or self._active or self._overflowed)

    def _pausing(self) -> bool:
        return not self._active and self._resume_at > _now()

    def _may_start(self) -> bool:
        if not self._queue or self._resume_at > _now():
            return False
        if not self._active:
            return True
        busy = sum(self._sizes[name] for name in self._active)
        return busy + self._sizes[self._queue[0]] <= self._limits.max_bytes

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    # -- on the loop: the work

    async def _work(self) -> None:
        while True:
            await self._until(self._may_start)
            name = self._queue.popleft()
            self._active.add(name)
            try:
                await self._upload(name)
            finally:
                self._active.discard(name)
                self._wake()
            if self._overflowed and len(self._queue) <= self._limits.max_count // 2:
                await self._pick_up()

    async def _upload(self, name: str) -> None:
        size = self._sizes[name]
        self._listeners.emit(TransferEvent("upload", "started", name, size))
        version = self._versions[name]
        try:
            data = self._memory.get(name)
            if data is None and self._tier is not None:
                data = await asyncio.to_thread(self._tier.get_range, name, 0, _EVERYTHING)
            if data is not None:
                self._sizes[name] = size = memoryview(data).nbytes
                await self._publish(data)
            await asyncio.to_thread(self._finished, name, version, data)
        except TransientError as exc:
            self._failed(exc)
            self._queue.appendleft(name)
            self._again.discard(name)
            self._listeners.emit(TransferEvent("upload", "retried", name, size, exc))
            return
        except CorruptError as exc:
            # Damaged on our own disk: nobody shall have it, and there is nothing to try again.
            self._error = exc
            await asyncio.to_thread(self._set_aside, name, version, data)
            self._listeners.emit(TransferEvent("upload", "failed", name, size, exc))
            self._on_problem(exc)
        except Exception as exc:  # noqa: BLE001 - a worker must live on whatever happens
            self._error = exc
            self._parked.add(name)
            self._listeners.emit(TransferEvent("upload", "failed", name, size, exc))
            self._on_problem(exc)
        else:
            self._error, self._pause_s = None, 0.0
            step: Step = "absent" if data is None else "done"
            self._listeners.emit(TransferEvent("upload", step, name, size))
        del self._sizes[name]
        if name in self._again:
            self._again.discard(name)
            self._active.discard(name)
            self._accept(name, size)

    def _finished(self, name: str, version: int, data: Buffer | None) -> None:
        """Forget what was uploaded, unless it was replaced meanwhile."""
        with self._memory_lock:
            if data is not None and self._memory.get(name) is data:
                del self._memory[name]
                self._memory_bytes -= memoryview(data).nbytes
        if self._tier is not None:
            with self._record_lock:
                if self._versions[name] == version:
                    self._tier.uploaded(name)
                    del self._versions[name]

    def _set_aside(self, name: str, version: int, data: Buffer | None) -> None:
        if self._tier is not None and name not in self._memory:
            with contextlib.suppress(S3CacheError):
                self._tier.quarantine(name)
        self._finished(name, version, data)

    def _failed(self, exc: TransientError) -> None:
        self._error = exc
        self._pause_s = min(2 * self._pause_s or _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        self._resume_at = _now() + self._pause_s
        asyncio.get_running_loop().call_later(self._pause_s, self._wake)
        self._on_problem(exc)

    # -- on the loop: records of others, and of our own that did not fit the queue

    async def _adopt_regularly(self, tier: LocalTier) -> None:
        while True:
            await self._adopt(tier)
            await asyncio.sleep(_ADOPT_EVERY_S)

    async def _adopt(self, tier: LocalTier) -> None:
        try:
            for name in await asyncio.to_thread(tier.adopt, self._namespace):
                self._accept(name, 0)
        except S3CacheError as exc:
            self._on_problem(exc)

    async def _pick_up(self) -> None:
        assert self._tier is not None
        self._overflowed = False
        for name in await asyncio.to_thread(self._tier.pending, self._namespace):
            if name not in self._parked:
                self._accept(name, 0)


_EVERYTHING = 1 << 62


def _now() -> float:
    return asyncio.get_running_loop().time()
