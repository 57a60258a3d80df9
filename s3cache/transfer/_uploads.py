"""Uploads: acknowledged at once, done later, and not forgotten if the process dies."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from s3cache._logs import logger_of
from s3cache.errors import (
    ClosedError,
    ConfigError,
    CorruptError,
    S3CacheError,
    TransientError,
    UntrustedError,
)
from s3cache.stats import Listeners, Step, TransferEvent
from s3cache.store import Buffer
from s3cache.transfer._backlog import Backlog, RecordingDisk, UploadQueue
from s3cache.transfer._loop import (
    SMALL_BYTES,
    BackgroundLoop,
    Batches,
    Deadline,
    cancel_all,
    one_by_one,
)

__all__ = ["FlushReport", "UploadLimits", "Uploads"]

# After a failure that may pass, uploads pause this long, twice as long after the next one.
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
# What was refused is tried again so much later, then twice as much later, and so on: somebody may
# have renewed credentials, set a clock, made a bucket or made room.
_FIRST_RETRY_S = 2.0
_LONGEST_RETRY_S = 300.0
# How often a process looks for what its dead neighbours have left.
_ADOPT_EVERY_S = 60.0
_CLOSE_TIMEOUT_S = 5.0
# The records are counted by a thread, and all of those may be in a name lookup that hangs.
_REPORT_TIMEOUT_S = 2.0
# Small files are read, and records removed, so many seconds late, a few at once.
_LINGER_S = 0.001

logger = logger_of("storage")


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
    """A queue of uploads, and the workers that see to it on the background loop.

    Objects come with a record on the disk, which holds their bytes, or as bytes in memory.
    :meth:`put` and :meth:`put_in_memory` never wait for the network.

    What other processes have left is adopted a few at a time until an upload proves that this one
    may write, and given back if it turns out that it may not, for a process that may. What they
    have left without a signature that we trust is left to them, and to processes that trust it.

    Args:
        publish: uploads the bytes of the object of that name, with the note of its record if this
            process adopted it; says whether it wrote anything, or found all there.
        disk: holds bytes and records; ``None`` if there is no local tier.
        on_problem: called on the loop's thread with each error that ends an attempt.

    Attributes:
        backlog: what is still to upload.
        pause_s: how long the last failure that may pass made uploads pause; each one in a row
            doubles it.
        retry_s: how long what was refused waits to be tried again; each refusal doubles it.
    """

    def __init__(
        self,
        loop: BackgroundLoop,
        publish: Callable[[str, Buffer, bytes | None], Awaitable[bool]],
        *,
        disk: RecordingDisk | None,
        limits: UploadLimits,
        listeners: Listeners,
        on_problem: Callable[[Exception], None],
    ) -> None:
        self.backlog = Backlog(disk, max_count=limits.max_count, max_bytes=limits.max_bytes)
        self._loop = loop
        self._publish = publish
        self._concurrency = limits.concurrency
        self._has_records = disk is not None
        self._listeners = listeners
        self._on_problem = on_problem
        self._read: Batches[str, Buffer | None] = Batches(
            one_by_one(self.backlog.read), linger_s=_LINGER_S
        )
        self._finish: Batches[tuple[str, int, Buffer | None], None] = Batches(
            one_by_one(lambda done: self.backlog.finish(*done)), linger_s=_LINGER_S
        )
        # Any thread appends, and wakes the loop up unless that has been done; the loop takes.
        self._handed_over: deque[tuple[str, int]] = deque()
        self._is_woken = False
        # What is not to be uploaded yet, with its size. Whoever takes a name out decides about it.
        self._held_back: dict[str, int] = {}

        # Touched on the loop only.
        self._queue = UploadQueue(max_count=limits.max_count, max_bytes=limits.max_bytes)
        self._picking_up = 0  # how many are looking for records that did not fit just now
        self._workers: list[asyncio.Task[None]] = []
        self._keeper: asyncio.Task[None] | None = None
        self._keeps_records = False
        self._changed = asyncio.Event()
        self._pause: asyncio.TimerHandle | None = None
        self.pause_s = 0.0
        self._retry: asyncio.TimerHandle | None = None
        self.retry_s = 0.0
        self._on_trial: set[str] = set()  # of what was refused: tried again, to see
        self._may_write = False  # proven, and not refused since
        self._adopt_at_once = 1  # until that is proven
        self._given_back: set[str] = set()  # not to be adopted again right away
        self._untrusted: set[str] = set()  # not to be adopted again by this process
        self._refusals = 0  # of what was adopted
        self._error: Exception | None = None
        self._stopped = False

    # -- on the caller's thread

    def start(self) -> None:
        """Begin to upload what processes that are gone have left, now and from time to time.

        Where no thread can be started now, that begins with the first upload.
        """
        self._keeps_records = self._has_records
        with contextlib.suppress(ClosedError):
            self._loop.call(self._keep_records)

    def put(self, name: str, data: Buffer) -> None:
        """Write the object to the disk, record it as pending, and queue it.

        Raises:
            StoreError: the disk could not take it; nothing was queued.
            ClosedError: uploads were closed; nothing was written.
        """
        self.backlog.put(name, data)
        with contextlib.suppress(ClosedError):  # at interpreter exit: a later process uploads it
            self._hand_over(name, memoryview(data).nbytes)

    def put_in_memory(self, name: str, data: Buffer) -> None:
        """Queue a copy of the object's bytes, which dies with the process.

        Raises:
            NoSpaceError: the queue is full.
            ClosedError: uploads were closed.
        """
        self.backlog.put_in_memory(name, data)
        try:
            self._hand_over(name, memoryview(data).nbytes)
        except ClosedError:
            self.backlog.forget_in_memory(name)
            raise

    def hold_back(self, name: str, data: Buffer, seconds: float) -> None:
        """Like :meth:`put`, or :meth:`put_in_memory` without a disk, but queue it later.

        A flush, the exit and a later process upload it as they do any other. Until somebody does,
        :meth:`take_back` undoes it.

        Raises:
            StoreError: the disk, or the memory for uploads, could not take it.
            ClosedError: uploads were closed.
        """
        self._held_back[name] = memoryview(data).nbytes
        try:
            if self._has_records:
                self.backlog.put(name, data)
            else:
                self.backlog.put_in_memory(name, data)
        except Exception:
            self._held_back.pop(name, None)
            raise
        with contextlib.suppress(ClosedError):
            self._loop.call(lambda: self._release_later(name, seconds))

    def take_back(self, name: str) -> bool:
        """Remove what was held back, wherever it is kept; false if it was not, or is no longer.

        Raises:
            StoreError: the disk fails.
        """
        if self._held_back.pop(name, None) is None:
            return False
        self.backlog.take_back(name)
        return True

    @property
    def pending(self) -> int:
        """How many uploads are queued, under way or given up for now; may be a moment old."""
        return self._queue.pending + len(self._held_back)

    def flush(self, timeout_s: float | None) -> FlushReport:
        """Wait until nothing is left that can be uploaded, at most ``timeout_s``.

        What was given up is tried once more, and a pause after a failure is cut short.
        """
        return self._wait_for(self._drain(), timeout_s)

    def flush_while_it_works(self, timeout_s: float) -> FlushReport:
        """Like :meth:`flush`, but end where uploads pause after a failure: for the exit.

        Of what was refused some is tried again, and all if that is not.
        """
        return self._wait_for(self._finish_while_it_works(), timeout_s)

    def close(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Stop uploading. Records stay, for others to adopt."""
        over = Deadline(timeout_s)
        self.backlog.close(timeout_s)
        with contextlib.suppress(ClosedError, concurrent.futures.TimeoutError):
            self._loop.wait(self._stop(), over.left_s)

    def _hand_over(self, name: str, size: int) -> None:
        """Have the loop queue it. Waking the loop is slow, so one wake-up serves all that wait."""
        self._handed_over.append((name, size))
        if not self._is_woken:
            self._is_woken = True
            try:
                self._loop.call(self._take_over)
            except BaseException:
                self._is_woken = False  # the next one tries again
                raise

    def _wait_for(self, work: Coroutine[Any, Any, None], timeout_s: float | None) -> FlushReport:
        try:
            with contextlib.suppress(concurrent.futures.TimeoutError):
                self._loop.wait(work, timeout_s)
            return self._loop.wait(self._report(), _REPORT_TIMEOUT_S)
        except ClosedError as exc:  # or there is no thread to be had
            left = {*self._known(), *self.backlog.recorded()}
            return FlushReport(len(left), self.backlog.in_memory, exc)
        except concurrent.futures.TimeoutError:  # the disk or a name server hangs
            return FlushReport(len(self._known()), self.backlog.in_memory, self._error)

    def _known(self) -> set[str]:
        """All that is not uploaded, as far as memory tells; for any thread."""
        handed_over = {name for name, _ in [*self._handed_over]}
        queued = {*self._queue.sizes, *self._queue.parked, *self._held_back}
        return handed_over | queued | self.backlog.known()

    # -- on the loop: the queue

    def _take_over(self) -> None:
        self._is_woken = (
            False  # first: what is appended from now on may come too late for this round
        )
        self._keep_records()
        while self._handed_over:
            name, size = self._handed_over.popleft()
            # Its record may have been found before it came here, and be done with.
            if self.backlog.is_own(name):
                self._accept(name, size)

    def _accept(self, name: str, size: int) -> None:
        if self._stopped:
            return
        if self._queue.add(name, size, has_record=not self.backlog.is_in_memory(name)):
            self._listeners.emit(TransferEvent("upload", "queued", name, size))
        if not self._workers:
            self._workers = [asyncio.ensure_future(self._work()) for _ in range(self._concurrency)]
        self._wake()

    def _release_later(self, name: str, seconds: float) -> None:
        asyncio.get_running_loop().call_later(seconds, self._release, name)

    def _release(self, name: str) -> None:
        size = self._held_back.pop(name, None)
        if size is not None:
            self._accept(name, size)

    def _release_all(self) -> None:
        for name in [*self._held_back]:
            self._release(name)

    async def _finish_while_it_works(self) -> None:
        self._take_over()
        self._release_all()
        self._try_some_again()
        await self._until(lambda: self._is_idle() or self._is_pausing())

    async def _drain(self) -> None:
        self._take_over()
        self._release_all()
        self._try_all_again()
        while True:
            refusals = self._refusals
            taken = await self._adopt()
            await self._pick_up()
            self._resume()
            await self._until(self._is_idle)
            if not taken or self._refusals > refusals or self._stopped:
                return

    async def _report(self) -> FlushReport:
        try:
            recorded = await asyncio.to_thread(self.backlog.recorded)
        except RuntimeError:  # no thread can be started
            recorded = self.backlog.recorded()
        remaining = {*self._known(), *recorded}
        return FlushReport(len(remaining), self.backlog.in_memory, self._error)

    async def _stop(self) -> None:
        self._stopped = True
        for timer in (self._pause, self._retry):
            if timer is not None:
                timer.cancel()
        await cancel_all([*self._workers, *([self._keeper] if self._keeper else [])])
        self._wake()

    def _is_idle(self) -> bool:
        return self._queue.is_idle and not self._picking_up

    def _is_pausing(self) -> bool:
        return self._pause is not None and not self._queue.active

    def _may_start(self) -> bool:
        return self._pause is None and self._queue.may_start

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not (self._stopped or condition()):
            await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()  # wakes all who wait now
        self._changed.clear()

    # -- on the loop: the work

    async def _work(self) -> None:
        while True:
            await self._until(self._may_start)
            if self._stopped:  # the cancellation got lost, see cancel_all()
                return
            name = self._queue.take()
            try:
                await self._upload(name)
            finally:
                self._queue.release(name)
                self._wake()
            if self._queue.has_room_again:
                await self._pick_up()

    async def _upload(self, name: str) -> None:
        """One attempt, and what becomes of it; raises nothing, for a worker must live on."""
        self._emit("started", name)
        try:
            there = await self._attempt(name)
        except TransientError as exc:
            self._queue.put_back(name)
            self._pause_uploads()
            self._fail("retried", name, exc)
            return
        except UntrustedError as exc:
            logger.debug("%s is left to processes that trust its signer: %s", name, exc)
            self._untrusted.add(name)
            with contextlib.suppress(S3CacheError):  # the disk fails: then it stays ours
                await asyncio.to_thread(self.backlog.give_back, name)
            self._emit("absent", name)
        except Exception as exc:  # noqa: BLE001 - whatever it is, the other uploads go on
            if not isinstance(exc, CorruptError):
                await self._refused(name, exc)
            self._fail("failed", name, exc)
        else:
            self._error, self.pause_s = None, 0.0
            self._emit("done" if there else "absent", name)
            if there and name in self._on_trial:
                self.retry_s = 0.0
                self._try_all_again()
        self._on_trial.discard(name)
        size, replaced = self._queue.end(name)
        # What came here while its record was being uploaded is done as well.
        if replaced and self.backlog.is_own(name):
            self._accept(name, size)

    async def _attempt(self, name: str) -> bool:
        """Upload the object and forget it; false if there is none (any more)."""
        is_adopted = self._is_adopted(name)
        version = self.backlog.version(name)
        data = self.backlog.bytes_in_memory(name)
        if data is None:
            data = await self._read_back(name)
        if data is not None:
            self._queue.sizes[name] = memoryview(data).nbytes
            note: bytes | None = None
            if is_adopted:
                note = await asyncio.to_thread(self.backlog.note, name)
                if note is None:  # it is somebody else's by now
                    return False
            try:
                if await self._publish(name, data, note):
                    self._may_write = True
            except CorruptError:
                # Damaged on our own disk: it is not uploaded, nor tried again.
                await asyncio.to_thread(self.backlog.set_aside, name, version, data)
                raise
        await self._finish((name, version, data))
        return data is not None

    async def _read_back(self, name: str) -> Buffer | None:
        if self._queue.sizes[name] <= SMALL_BYTES:
            return await self._read(name)
        return await asyncio.to_thread(self.backlog.read, name)

    def _emit(self, step: Step, name: str, error: Exception | None = None) -> None:
        self._listeners.emit(TransferEvent("upload", step, name, self._queue.sizes[name], error))

    def _fail(self, step: Step, name: str, error: Exception) -> None:
        self._error = error
        self._emit(step, name, error)
        self._on_problem(error)

    def _pause_uploads(self) -> None:
        # Uploads that were under way together fail together: that is one failure.
        if self._pause is None:
            self.pause_s = min(2 * self.pause_s or _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
            loop = asyncio.get_running_loop()
            self._pause = loop.call_later(self.pause_s, self._resume)

    def _resume(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        self._wake()

    # -- on the loop: what was refused

    async def _refused(self, name: str, error: Exception) -> None:
        """Keep what is ours to upload for later; give back what was adopted."""
        if not isinstance(error, ConfigError):  # which is about one object
            self._may_write = False
        if self._is_adopted(name):
            self._refusals += 1
            self._adopt_at_once = 1
            self._given_back.add(name)
            with contextlib.suppress(S3CacheError):  # the disk fails: then it stays ours
                if await asyncio.to_thread(self.backlog.give_back, name):
                    return
        self._queue.park(name)
        if self._retry is None and not self._stopped:
            self.retry_s = min(2 * self.retry_s or _FIRST_RETRY_S, _LONGEST_RETRY_S)
            loop = asyncio.get_running_loop()
            self._retry = loop.call_later(self.retry_s, self._try_some_again)

    def _try_some_again(self) -> None:
        """A few tell whether the refusal has passed; the one refused last is tried last."""
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        for name, size in [*islice(self._queue.parked.items(), self._concurrency)]:
            self._on_trial.add(name)
            self._accept(name, size)

    def _try_all_again(self) -> None:
        for name, size in [*self._queue.parked.items()]:
            self._accept(name, size)

    # -- on the loop: records of others, and of our own that the queue does not know

    def _keep_records(self) -> None:
        if self._keeps_records and self._keeper is None and not self._stopped:
            self._keeper = asyncio.ensure_future(self._adopt_regularly())

    def _is_adopted(self, name: str) -> bool:
        return self._has_records and not self.backlog.is_own(name)

    async def _adopt_regularly(self) -> None:
        while True:
            refusals = self._refusals
            taken = await self._adopt()
            await self._pick_up()
            await self._until(partial(taken.isdisjoint, self._queue.sizes))
            if not taken or self._refusals > refusals:
                await asyncio.sleep(_ADOPT_EVERY_S)

    async def _adopt(self) -> set[str]:
        """Take over some of what others have left; returns the names."""
        limit = None if self._may_write else self._adopt_at_once
        # What was refused comes last, but it does come again.
        but, self._given_back = self._given_back, set()
        adopted: dict[str, int] = {}
        with self._records_read():
            adopted = await asyncio.to_thread(self.backlog.adopt, limit, but | self._untrusted)
            self._accept_records(adopted)
        if adopted:
            self._adopt_at_once *= 2
        return {*adopted}

    async def _pick_up(self) -> None:
        """Queue records of ours that did not fit, or were made before there was a queue."""
        self._queue.overflowed = False
        self._picking_up += 1
        try:
            # What is known now and no longer then has been uploaded meanwhile.
            known = {*self._queue.sizes, *self._held_back}
            with self._records_read():
                self._accept_records(await asyncio.to_thread(self.backlog.records, known))
        finally:
            self._picking_up -= 1
            self._wake()

    @contextlib.contextmanager
    def _records_read(self) -> Iterator[None]:
        """Whatever keeps records from being read, later is soon enough."""
        try:
            yield
        except S3CacheError as exc:
            logger.debug("no record was read: %s", exc)  # the disk's users warn of it
        except Exception as exc:  # noqa: BLE001 - the loop's tasks must live on
            self._on_problem(exc)

    def _accept_records(self, sizes: Mapping[str, int]) -> None:
        for name, size in sizes.items():
            known = (self._queue.sizes, self._queue.parked, self._held_back)
            if not any(name in names for names in known):
                self._accept(name, size)
