"""Uploads: acknowledged at once, done later, and not forgotten if the process dies."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

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
from s3cache.tier._backlog import Backlog, PendingDisk, UploadQueue
from s3cache.tier._loop import BackgroundLoop, Deadline, cancel_all
from s3cache.util.logs import logger_of

__all__ = ["FlushReport", "UploadLimits", "Uploads"]

# After a failure that may pass, uploads pause this long, twice as long after the next one.
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
# What was refused is tried again so much later, then twice as much later, and so on: by then there
# may be new credentials, the right time, a bucket or room.
_FIRST_RETRY_S = 2.0
_LONGEST_RETRY_S = 300.0
# How often a process looks for what processes that are gone have left.
_ADOPT_EVERY_S = 60.0
_CLOSE_TIMEOUT_S = 5.0
# What is pending is counted by a thread, and all of those may be in a name lookup that hangs.
_REPORT_TIMEOUT_S = 2.0

logger = logger_of("storage")


@dataclass(frozen=True, slots=True)
class UploadLimits:
    """What uploads may take.

    Attributes:
        concurrency: uploads at once.
        max_count: objects queued. More are picked up later from the disk.
        max_bytes: payload held in memory at once; one object larger than that goes alone.
    """

    concurrency: int
    max_count: int
    max_bytes: int


@dataclass(frozen=True, slots=True)
class FlushReport:
    """What remains to be uploaded after a flush.

    Attributes:
        remaining: objects not uploaded yet. Those that are pending in the local tier are uploaded
            by a later process.
        in_memory: how many of them are in memory alone and die with this process.
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

    Objects are pending on the disk, which holds their bytes, or wait as bytes in memory. No method
    but the flushes waits for the network.

    What other processes have left is adopted a few at a time until an upload proves that this one
    may write, and given back if it turns out that it may not, for a process that may. What they
    have left without a signature that we trust is left to processes that trust it.

    Args:
        publish: uploads the bytes of the object of that name, with the note on it if this process
            adopted it; returns whether it wrote anything, or found all there.
        disk: holds bytes, and what is pending; ``None`` if there is no local tier.
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
        disk: PendingDisk | None,
        limits: UploadLimits,
        listeners: Listeners,
        on_problem: Callable[[Exception], None],
    ) -> None:
        self.backlog = Backlog(disk, max_count=limits.max_count, max_bytes=limits.max_bytes)
        self._disk = disk
        self._loop = loop
        self._publish = publish
        self._concurrency = limits.concurrency
        self._listeners = listeners
        self._on_problem = on_problem
        # Any thread appends, and wakes the loop unless that has been done; the loop takes.
        self._handed_over: deque[tuple[str, int]] = deque()
        self._is_woken = False
        # What is not to be uploaded yet, with its size. The thread that takes a name out decides.
        self._delayed: dict[str, int] = {}

        # Touched on the loop only.
        self._queue = UploadQueue(max_count=limits.max_count, max_bytes=limits.max_bytes)
        self._picking_up = 0  # how many tasks are looking for what did not fit
        self._workers: list[asyncio.Task[None]] = []
        self._adopter: asyncio.Task[None] | None = None
        self._may_adopt = False
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
        self._is_stopped = False

    # -- on the caller's thread

    def start(self) -> None:
        """Begin to upload what processes that are gone have left, now and from time to time.

        Where no thread can be started now, that begins with the first upload.
        """
        self._may_adopt = self._disk is not None
        with contextlib.suppress(ClosedError):
            self._loop.call(self._start_adopter)

    def put(self, name: str, data: Buffer) -> None:
        """Write the object to the disk, pending, and queue it.

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
            self.backlog.remove_from_memory(name)
            raise

    def put_delayed(self, name: str, data: Buffer, seconds: float) -> None:
        """Like :meth:`put`, or :meth:`put_in_memory` without a disk, but queue it later.

        A flush, the exit and a later process upload it as they do any other. Until then,
        :meth:`cancel_delayed` undoes it.

        Raises:
            StoreError: the disk, or the memory for uploads, could not take it.
            ClosedError: uploads were closed.
        """
        self._delayed[name] = memoryview(data).nbytes
        try:
            put = self.backlog.put_in_memory if self._disk is None else self.backlog.put
            put(name, data)
        except Exception:
            self._delayed.pop(name, None)
            raise
        with contextlib.suppress(ClosedError):
            self._loop.call(self._release_later, name, seconds)

    def cancel_delayed(self, name: str) -> bool:
        """Remove a delayed object; return False if it is not, or no longer, delayed.

        Raises:
            StoreError: the disk fails.
        """
        if self._delayed.pop(name, None) is None:
            return False
        self.backlog.remove(name)
        return True

    @property
    def pending(self) -> int:
        """How many uploads are queued, under way or given up for now; may be a moment old."""
        return len(self._queue) + len(self._delayed)

    def flush(self, timeout_s: float | None) -> FlushReport:
        """Wait until nothing is left that can be uploaded, at most ``timeout_s``.

        What was given up is tried once more, and a pause after a failure is cut short.
        """
        return self._wait_for(self._drain(), timeout_s)

    def flush_while_it_works(self, timeout_s: float) -> FlushReport:
        """Like :meth:`flush`, but end where uploads pause after a failure: for the exit.

        Of what was refused some is tried again, and all if that is accepted.
        """
        return self._wait_for(self._drain_until_a_pause(), timeout_s)

    def close(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Stop uploading. What is pending on the disk stays so, for others to adopt."""
        deadline = Deadline(timeout_s)
        self.backlog.close(timeout_s)
        with contextlib.suppress(ClosedError, concurrent.futures.TimeoutError):
            self._loop.wait(self._stop(), deadline.left_s)

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
        except ClosedError as exc:  # or no thread can be started
            left = self._known() | self.backlog.pending()
            return FlushReport(len(left), self.backlog.in_memory, exc)
        except concurrent.futures.TimeoutError:  # the disk or a name server hangs
            return FlushReport(len(self._known()), self.backlog.in_memory, self._error)

    def _known(self) -> set[str]:
        """Return all that is not uploaded, without asking the disk; for any thread."""
        handed_over = {name for name, _ in [*self._handed_over]}
        return handed_over | {*self._queue, *self._delayed} | self.backlog.known()

    # -- on the loop: the queue

    def _take_over(self) -> None:
        # First: what is appended from now on may come too late for this round.
        self._is_woken = False
        self._start_adopter()
        while self._handed_over:
            name, size = self._handed_over.popleft()
            if self.backlog.is_own(name):  # else it was found on the disk, and uploaded already
                self._enqueue(name, size)

    def _enqueue(self, name: str, size: int) -> None:
        if self._is_stopped:
            return
        if self._queue.add(name, size, is_on_disk=not self.backlog.is_in_memory(name)):
            self._listeners.emit(TransferEvent("upload", "queued", name, size))
        if not self._workers:
            self._workers = [asyncio.ensure_future(self._work()) for _ in range(self._concurrency)]
        self._wake()

    def _release_later(self, name: str, seconds: float) -> None:
        asyncio.get_running_loop().call_later(seconds, self._release, name)

    def _release(self, name: str) -> None:
        size = self._delayed.pop(name, None)
        if size is not None:
            self._enqueue(name, size)

    def _queue_everything(self, refused: Callable[[], None]) -> None:
        """Queue all that waits; ``refused`` queues what was refused."""
        self._take_over()
        for name in [*self._delayed]:
            self._release(name)
        refused()

    async def _drain_until_a_pause(self) -> None:
        self._queue_everything(self._try_some_again)
        await self._until(lambda: self._is_idle() or self._is_pausing())

    async def _drain(self) -> None:
        self._queue_everything(self._try_all_again)
        while True:
            refusals = self._refusals
            adopted = await self._adopt()
            await self._pick_up()
            self._resume()
            await self._until(self._is_idle)
            if not adopted or self._refusals > refusals or self._is_stopped:
                return

    async def _report(self) -> FlushReport:
        try:
            pending = await asyncio.to_thread(self.backlog.pending)
        except RuntimeError:  # no thread can be started
            pending = self.backlog.pending()
        return FlushReport(len(self._known() | pending), self.backlog.in_memory, self._error)

    async def _stop(self) -> None:
        self._is_stopped = True
        for timer in (self._pause, self._retry):
            if timer is not None:
                timer.cancel()
        await cancel_all([*self._workers, *([self._adopter] if self._adopter else [])])
        self._wake()

    def _is_idle(self) -> bool:
        return self._queue.is_idle and not self._picking_up

    def _is_pausing(self) -> bool:
        return self._pause is not None and not self._queue.active

    def _may_start(self) -> bool:
        return self._pause is None and self._queue.may_start

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not (self._is_stopped or condition()):
            await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()  # wakes all that wait now
        self._changed.clear()

    # -- on the loop: the work

    async def _work(self) -> None:
        while True:
            await self._until(self._may_start)
            if self._is_stopped:  # the cancellation got lost, see cancel_all()
                return
            name = self._queue.take()
            try:
                await self._upload(name)
            finally:
                self._queue.active.discard(name)
                self._wake()
            if self._queue.has_room_again:
                await self._pick_up()

    async def _upload(self, name: str) -> None:
        """Try once, and act on the outcome; raise nothing, for a worker must live on."""
        self._emit("started", name)
        try:
            is_uploaded = await self._attempt(name)
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
            self._emit("done" if is_uploaded else "absent", name)
            if is_uploaded and name in self._on_trial:
                self.retry_s = 0.0
                self._try_all_again()
        self._on_trial.discard(name)
        size, was_replaced = self._queue.end(name)
        # An adopted object that was put here while it was uploaded is done as well.
        if was_replaced and self.backlog.is_own(name):
            self._enqueue(name, size)

    async def _attempt(self, name: str) -> bool:
        """Upload the object and forget it; return False if there is none (any more)."""
        is_adopted = self._is_adopted(name)
        version = self.backlog.version(name)
        data = self.backlog.read_memory(name)
        if data is None and self._disk is not None:
            data = await asyncio.to_thread(self._disk.peek, name)
        if data is not None:
            self._queue.sizes[name] = memoryview(data).nbytes
            note: bytes | None = None
            if is_adopted:
                assert self._disk is not None
                note = await asyncio.to_thread(self._disk.note, name)
                if note is None:  # it belongs to another process by now
                    return False
            try:
                if await self._publish(name, data, note):
                    self._may_write = True
            except CorruptError:  # damaged on our own disk: it is not tried again
                await asyncio.to_thread(self.backlog.set_aside, name, version, data)
                raise
        await asyncio.to_thread(self.backlog.finish, name, version, data)
        return data is not None

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
        if self._retry is None and not self._is_stopped:
            self.retry_s = min(2 * self.retry_s or _FIRST_RETRY_S, _LONGEST_RETRY_S)
            loop = asyncio.get_running_loop()
            self._retry = loop.call_later(self.retry_s, self._try_some_again)

    def _try_some_again(self) -> None:
        """Try a few, to see whether the refusal has passed; the one refused last comes last."""
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        for name, size in [*islice(self._queue.parked.items(), self._concurrency)]:
            self._on_trial.add(name)
            self._enqueue(name, size)

    def _try_all_again(self) -> None:
        for name, size in [*self._queue.parked.items()]:
            self._enqueue(name, size)

    # -- on the loop: what is pending on the disk and not queued, ours and that of others

    def _start_adopter(self) -> None:
        if self._may_adopt and self._adopter is None and not self._is_stopped:
            self._adopter = asyncio.ensure_future(self._adopt_regularly())

    def _is_adopted(self, name: str) -> bool:
        return self._disk is not None and not self.backlog.is_own(name)

    async def _adopt_regularly(self) -> None:
        while True:
            refusals = self._refusals
            adopted = await self._adopt()
            await self._pick_up()
            await self._until(partial(adopted.isdisjoint, self._queue.sizes))
            if not adopted or self._refusals > refusals:
                await asyncio.sleep(_ADOPT_EVERY_S)

    async def _adopt(self) -> set[str]:
        """Take over some of what others have left; return the names."""
        limit = None if self._may_write else self._adopt_at_once
        # What was refused comes last, but it does come again.
        but, self._given_back = self._given_back, set()
        adopted = await self._enqueue_found(
            partial(self.backlog.adopt, limit, but | self._untrusted)
        )
        if adopted:
            self._adopt_at_once *= 2
        return adopted

    async def _pick_up(self) -> None:
        """Queue what is pending and did not fit, or was so before there was a queue."""
        self._queue.has_overflowed = False
        self._picking_up += 1
        try:
            # What is known now and no longer then has been uploaded meanwhile.
            known = {*self._queue.sizes, *self._delayed}
            await self._enqueue_found(partial(self.backlog.sizes_pending, known))
        finally:
            self._picking_up -= 1
            self._wake()

    async def _enqueue_found(self, look: Callable[[], Mapping[str, int]]) -> set[str]:
        """Queue what ``look`` finds on the disk; return the names.

        Whatever keeps it from being found, later is soon enough.
        """
        try:
            sizes = await asyncio.to_thread(look)
        except S3CacheError as exc:
            logger.debug("nothing pending was read: %s", exc)  # users of the disk warn of it
            return set()
        except Exception as exc:  # noqa: BLE001 - the loop's tasks must live on
            self._on_problem(exc)
            return set()
        for name, size in sizes.items():
            if name not in self._queue and name not in self._delayed:
                self._enqueue(name, size)
        return {*sizes}
