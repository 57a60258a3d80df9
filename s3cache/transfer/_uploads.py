"""Uploads: acknowledged at once, done later, and not forgotten if the process dies."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Coroutine
from dataclasses import dataclass
from typing import Any

from s3cache.errors import ClosedError, CorruptError, S3CacheError, TransientError
from s3cache.store._base import Buffer
from s3cache.tier import LocalTier
from s3cache.transfer._batches import SMALL_BYTES, Batches, each
from s3cache.transfer._events import Listeners, Step, TransferEvent
from s3cache.transfer._held import HeldBytes
from s3cache.transfer._loop import BackgroundLoop, cancelled

__all__ = ["FlushReport", "UploadLimits", "Uploads"]

# After a failure that may pass, uploads pause this long, twice as long after the next one.
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
# How often a process looks for what its dead neighbours have left.
_ADOPT_EVERY_S = 60.0
_CLOSE_TIMEOUT_S = 5.0
# The records are counted by a thread, and all of those may be in a name lookup that hangs.
_REPORT_TIMEOUT_S = 2.0
# Of the memory that uploads may take, for what waits and has just been written to the disk.
_FRESH_PART = 0.25
_EVERYTHING = 1 << 62
_RECORD_LOCKS = 32
# Small files are read, and records removed, so many seconds late, a few at once.
_LINGER_S = 0.001

logger = logging.getLogger("s3cache")


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
        publish: uploads the bytes of the object of that name.
        tier: holds bytes and records; ``None`` if there is no local tier.
        namespace: prefix of the names that are ours.
        on_problem: told, on the loop's thread, of each error that ends an attempt.
    """

    def __init__(
        self,
        loop: BackgroundLoop,
        publish: Callable[[str, Buffer], Awaitable[None]],
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
        self._parked: dict[str, int] = {}  # given up until a flush or a later process; sizes
        self._overflowed = False  # there are records that did not fit the queue
        self._picking_up = 0  # how many are looking for such records just now
        self._workers: list[asyncio.Task[None]] = []
        self._keeper: asyncio.Task[None] | None = None
        self._waiters: list[asyncio.Future[None]] = []
        self._pause: asyncio.TimerHandle | None = None
        self._pause_s = 0.0
        self._error: Exception | None = None
        self._stopped = False

        # Of objects without a record, all there is. They die with the process.
        self._held = HeldBytes(max_count=limits.max_count, max_bytes=limits.max_bytes)
        # Of objects with a record, as many as fit: those need not be read back from the disk.
        self._fresh = HeldBytes(
            max_count=limits.max_count, max_bytes=int(_FRESH_PART * limits.max_bytes)
        )
        self._small: Batches[tuple[LocalTier, str], Buffer | None] = Batches(
            each(lambda wanted: wanted[0].get_range(wanted[1], 0, _EVERYTHING)),
            linger_s=_LINGER_S,
        )
        self._finish: Batches[tuple[str, int, Buffer | None], None] = Batches(
            each(lambda done: self._finished(*done)), linger_s=_LINGER_S
        )

        # Held while an object and its record change together, which takes as long as the disk:
        # one lock for all would have every upload that ends wait for whoever saves. The version
        # tells the end of an upload that the object was replaced while it was under way.
        self._record_locks = [threading.Lock() for _ in range(_RECORD_LOCKS)]
        self._versions: Counter[str] = Counter()  # of all objects put here and not uploaded
        # Any thread appends, and wakes the loop up unless that has been done; the loop takes.
        self._handed_over: deque[tuple[str, int]] = deque()
        self._told = False
        self._closed = False

    # -- on the caller's thread

    def start(self) -> None:
        """Begin to upload what processes that are gone have left, now and from time to time."""
        if self._tier is not None:
            self._loop.call(self._keep_records, self._tier)

    def put(self, tier: LocalTier, name: str, data: Buffer) -> None:
        """Write the object to the local tier, record it as pending, and queue it.

        Raises:
            StoreError: the local tier could not take it; nothing was queued.
            ClosedError: uploads were closed; nothing was written.
        """
        with self._record_lock(name):
            if self._closed:
                raise ClosedError("the cache was closed")
            tier.put_pending(name, data)
            self._held.remove(name)  # it is older
            if not self._fresh.replace(name, data):
                self._fresh.remove(name)
            # Last: an upload that sees the new version reads the new bytes.
            self._versions[name] += 1
        with contextlib.suppress(ClosedError):  # at interpreter exit: a later process uploads it
            self._hand_over(name, memoryview(data).nbytes)

    def put_in_memory(self, name: str, data: Buffer) -> None:
        """Queue a copy of the object's bytes, which dies with the process.

        Raises:
            NoSpaceError: the queue is full.
            ClosedError: uploads were closed.
        """
        if self._closed:
            raise ClosedError("the cache was closed")
        self._held.admit(name, data)
        try:
            self._hand_over(name, memoryview(data).nbytes)
        except ClosedError:
            self._held.remove(name)
            raise

    def _hand_over(self, name: str, size: int) -> None:
        """Have the loop queue it; waking the loop up is dear, so once for all that wait."""
        self._handed_over.append((name, size))
        if not self._told:
            self._told = True
            self._loop.call(self._take_over)

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
        try:
            with contextlib.suppress(concurrent.futures.TimeoutError):
                self._loop.wait(work, timeout_s)
            return self._loop.wait(self._report(), _REPORT_TIMEOUT_S)
        except ClosedError as exc:
            return FlushReport(self.pending, len(self._held), exc)
        except concurrent.futures.TimeoutError:  # the disk or a name server hangs
            return FlushReport(self.pending, len(self._held), self._error)

    def close(self) -> None:
        """Stop uploading. Records stay, for :meth:`LocalTier.close` to leave to others."""
        with contextlib.ExitStack() as nobody_puts:
            for lock in self._record_locks:
                nobody_puts.enter_context(lock)
            self._closed = True
        with contextlib.suppress(ClosedError, concurrent.futures.TimeoutError):
            self._loop.wait(self._stop(), _CLOSE_TIMEOUT_S)

    # -- on the loop: the queue

    async def _report(self) -> FlushReport:
        known = {*self._sizes, *self._parked, *await asyncio.to_thread(self._recorded)}
        return FlushReport(len(known), len(self._held), self._error)

    def _recorded(self) -> set[str]:
        known = set(self._versions)  # at once: no other thread runs meanwhile
        if self._tier is not None:
            with contextlib.suppress(S3CacheError):
                known.update(self._tier.pending(self._namespace))
        return known

    def _take_over(self) -> None:
        self._told = False  # first: what is appended from now on may come too late for the rest
        while self._handed_over:
            self._accept(*self._handed_over.popleft())

    def _accept(self, name: str, size: int) -> None:
        if self._stopped:
            return
        self._parked.pop(name, None)
        if name in self._active:
            self._again.add(name)
        elif name in self._sizes:
            self._sizes[name] = size
        elif len(self._queue) >= self._limits.max_count and name not in self._held:
            self._overflowed = True  # its record stays
        else:
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
        for name, size in [*self._parked.items()]:
            self._accept(name, size)
        await self._pick_up()
        self._resume()
        await self._until(self._idle)

    async def _stop(self) -> None:
        self._stopped = True
        if self._pause is not None:
            self._pause.cancel()
        await cancelled([*self._workers, *([self._keeper] if self._keeper else [])])
        self._wake()

    def _idle(self) -> bool:
        return not (self._queue or self._active or self._overflowed or self._picking_up)

    def _pausing(self) -> bool:
        return not self._active and self._pause is not None

    def _may_start(self) -> bool:
        if not self._queue or self._pause is not None:
            return False
        if not self._active:
            return True
        busy = sum(self._sizes[name] for name in self._active)
        return busy + self._sizes[self._queue[0]] <= (1 - _FRESH_PART) * self._limits.max_bytes

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not (self._stopped or condition()):
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
            if self._stopped:  # the cancellation got lost, see cancelled()
                return
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
        """One attempt, and what becomes of it; raises nothing, for a worker must live on."""
        self._listeners.emit(TransferEvent("upload", "started", name, self._sizes[name]))
        try:
            there = await self._attempt(name)
        except TransientError as exc:
            self._error = exc
            self._queue.appendleft(name)
            self._again.discard(name)
            self._pause_uploads()
            self._listeners.emit(TransferEvent("upload", "retried", name, self._sizes[name], exc))
            self._on_problem(exc)
            return
        except Exception as exc:  # noqa: BLE001 - whatever it is, the other uploads go on
            self._error = exc
            if not isinstance(exc, CorruptError):
                self._parked[name] = self._sizes[name]
            self._listeners.emit(TransferEvent("upload", "failed", name, self._sizes[name], exc))
            self._on_problem(exc)
        else:
            self._error, self._pause_s = None, 0.0
            step: Step = "done" if there else "absent"
            self._listeners.emit(TransferEvent("upload", step, name, self._sizes[name]))
        size = self._sizes.pop(name)
        if name in self._again:
            self._again.discard(name)
            self._active.discard(name)
            self._accept(name, size)

    async def _attempt(self, name: str) -> bool:
        """Upload the object and forget it; false if there is none (any more)."""
        version = self._versions[name]
        data: Buffer | None = self._held.get(name) or self._fresh.get(name)
        if data is None and self._tier is not None:
            data = await self._read_back(self._tier, name)
        if data is not None:
            self._sizes[name] = memoryview(data).nbytes
            try:
                await self._publish(name, data)
            except CorruptError:
                # Damaged on our own disk: nobody shall have it, and there is nothing to try again.
                await asyncio.to_thread(self._set_aside, name, version, data)
                raise
        await self._finish((name, version, data))
        return data is not None

    async def _read_back(self, tier: LocalTier, name: str) -> Buffer | None:
        if self._sizes[name] <= SMALL_BYTES:
            return await self._small((tier, name))
        return await asyncio.to_thread(tier.get_range, name, 0, _EVERYTHING)

    def _finished(self, name: str, version: int, data: Buffer | None) -> None:
        """Forget what was uploaded, unless it was replaced meanwhile."""
        self._fresh.remove_if_same(name, data)
        from_memory = self._held.remove_if_same(name, data)
        if self._tier is None:
            return
        # What was held in memory was so because the tier fails; it seldom has a record too.
        with contextlib.suppress(*([S3CacheError] if from_memory else [])), self._record_lock(name):
            if self._versions[name] == version:
                self._tier.uploaded(name)
                del self._versions[name]

    def _record_lock(self, name: str) -> threading.Lock:
        return self._record_locks[hash(name) % _RECORD_LOCKS]

    def _set_aside(self, name: str, version: int, data: Buffer | None) -> None:
        if self._tier is not None and name not in self._held:
            with self._record_lock(name):
                if self._versions[name] == version:
                    self._tier.quarantine(name)
        self._finished(name, version, data)

    def _pause_uploads(self) -> None:
        # Uploads that were under way together fail together: that is one failure.
        if self._pause is None:
            self._pause_s = min(2 * self._pause_s or _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
            loop = asyncio.get_running_loop()
            self._pause = loop.call_later(self._pause_s, self._resume)

    def _resume(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        self._wake()

    # -- on the loop: records of others, and of our own that the queue does not know

    def _keep_records(self, tier: LocalTier) -> None:
        if not self._stopped:
            self._keeper = asyncio.ensure_future(self._adopt_regularly(tier))

    async def _adopt_regularly(self, tier: LocalTier) -> None:
        while True:
            await self._adopt(tier)
            await self._pick_up()
            await asyncio.sleep(_ADOPT_EVERY_S)

    async def _adopt(self, tier: LocalTier) -> None:
        try:
            names = await asyncio.to_thread(tier.adopt, self._namespace)
            await self._accept_records(tier, names)
        except S3CacheError as exc:
            logger.debug("s3cache: nothing was adopted: %s", exc)  # the tier's users warn of it
        except Exception as exc:  # noqa: BLE001 - later is soon enough
            self._on_problem(exc)

    async def _pick_up(self) -> None:
        """Queue records of ours that did not fit, or were made before there was a queue."""
        if self._tier is None:
            return
        self._overflowed = False
        self._picking_up += 1
        known = {*self._sizes}
        try:
            names = await asyncio.to_thread(self._tier.pending, self._namespace)
            # What was known and is no longer has been uploaded meanwhile.
            await self._accept_records(self._tier, {*names} - known)
        except S3CacheError as exc:
            logger.debug("s3cache: no record was read: %s", exc)
        except Exception as exc:  # noqa: BLE001 - later is soon enough
            self._on_problem(exc)
        finally:
            self._picking_up -= 1
            self._wake()

    async def _accept_records(self, tier: LocalTier, names: Collection[str]) -> None:
        if names:
            sizes = await asyncio.to_thread(_sizes, tier, self._namespace)
            for name in names:
                if name not in self._sizes and name not in self._parked:
                    self._accept(name, sizes.get(name, 0))


def _sizes(tier: LocalTier, prefix: str) -> dict[str, int]:
    return {info.key: info.size for info in tier.objects(prefix)}
