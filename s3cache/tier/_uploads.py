"""Uploads: acknowledged at once, done later, and not forgotten if the process dies."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from s3cache.errors import (
    ClosedError,
    ConfigError,
    CorruptError,
    NoSpaceError,
    S3CacheError,
    TransientError,
    UntrustedError,
)
from s3cache.stats import Listeners, Step, TransferEvent
from s3cache.store import Buffer
from s3cache.tier._disk import DiskTier
from s3cache.tier._loop import BackgroundLoop, Budget, cancel_all
from s3cache.util.logs import logger_of

__all__ = ["FlushReport", "Uploads"]

_T = TypeVar("_T")

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
_REPORT_TIMEOUT_S = 2.0

logger = logger_of("storage")


@dataclass(frozen=True, slots=True)
class FlushReport:
    """What remains to be uploaded after a flush.

    Attributes:
        remaining: objects not uploaded yet; a later process uploads what is on the disk.
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
    """A queue of names to upload, and the workers that see to it on the background loop.

    The bytes are pending on the disk, or wait in memory and die with the process. No method but the
    flushes waits for the network. Those that keep something raise ``StoreError`` where there is no
    room or the disk fails, and ``ClosedError`` after :meth:`close`.

    What other processes have left is adopted a few at a time until an upload proves that this one
    may write, and given back if it turns out that it may not, for a process that may. What they
    have left without a signature that we trust is left to processes that trust it.

    Args:
        publish: uploads the bytes of the object of that name, with the note on it if another
            process saved it; returns whether it wrote anything, or found all there.
        max_count: objects that wait in memory, because there is no disk or it fails.
        max_bytes: bytes of those, and of objects that are read from the disk at once; one object
            larger than that goes alone.
        on_problem: called on the loop's thread with each error that ends an attempt.

    Attributes:
        pause_s: how long the last failure that may pass made uploads pause; the next doubles it.
        retry_s: how long what was refused waits to be tried again; each refusal doubles it.
    """

    def __init__(
        self,
        loop: BackgroundLoop,
        publish: Callable[[str, Buffer, bytes | None], Awaitable[bool]],
        *,
        disk: DiskTier | None,
        concurrency: int,
        max_count: int,
        max_bytes: int,
        listeners: Listeners,
        on_problem: Callable[[Exception], None],
    ) -> None:
        self._disk = disk
        self._loop = loop
        self._publish = publish
        self._concurrency = concurrency
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._listeners = listeners
        self._on_problem = on_problem
        self._is_closed = False
        self._memory: dict[str, bytes] = {}  # what is not on the disk
        self._mutex = threading.Lock()
        # What is not to be uploaded yet, with its size. The thread that takes a name out decides.
        self._delayed: dict[str, int] = {}
        self._arriving: set[str] = set()  # on their way from the disk to the queue
        # Touched on the loop only. An object is queued, active or refused; it has a size in the
        # first two states, 0 as long as it is not known.
        self._queue: deque[str] = deque()
        self._active: set[str] = set()
        self._refused: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        self._put_again: set[str] = set()  # while active
        self._on_trial: set[str] = set()  # of what was refused: tried again, to see
        self._reading = Budget(max_bytes)
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._is_stopped = False
        self._error: Exception | None = None
        self._pause: asyncio.TimerHandle | None = None
        self.pause_s = 0.0
        self._retry: asyncio.TimerHandle | None = None
        self.retry_s = 0.0
        self._adopts = False
        self._may_write = False  # proven, and not refused since
        self._adopt_at_once = 1  # until that is proven
        self._given_back: set[str] = set()  # not to be adopted again right away
        self._untrusted: set[str] = set()  # not to be adopted again by this process
        self._refusals = 0  # of what was adopted

    # -- on the caller's thread

    def start(self, names: Iterable[str] = ()) -> None:
        """Begin to upload ``names``, which are pending, and what processes that are gone leave."""
        self._adopts = self._disk is not None
        with contextlib.suppress(ClosedError):
            self._loop.call(self._start_tasks)
            for name in names:
                self._loop.call(self._enqueue, name)

    def put(self, name: str, data: Buffer) -> None:
        """Write the object to the disk, pending, and queue it."""
        self._arriving.add(name)
        try:
            self._keep_on_disk(name, data)
        except Exception:
            self._arriving.discard(name)
            raise
        self._delayed.pop(name, None)
        try:
            self._loop.call(self._enqueue, name, memoryview(data).nbytes)
        except ClosedError:  # a later look at the disk, or a later process, uploads it
            self._arriving.discard(name)

    def put_in_memory(self, name: str, data: Buffer) -> None:
        """Queue a copy of the object's bytes, which dies with the process."""
        self._keep_in_memory(name, data)
        try:
            self._loop.call(self._enqueue, name, memoryview(data).nbytes)
        except ClosedError:
            self._memory.pop(name, None)
            raise

    def put_delayed(self, name: str, data: Buffer, seconds: float) -> None:
        """Put it, in memory without a disk; queue it later, or with a flush, unless cancelled."""
        self._delayed[name] = memoryview(data).nbytes
        try:
            (self._keep_in_memory if self._disk is None else self._keep_on_disk)(name, data)
        except Exception:
            self._delayed.pop(name, None)
            raise
        with contextlib.suppress(ClosedError):
            loop = self._loop
            loop.call(lambda: asyncio.get_running_loop().call_later(seconds, self._release, name))

    def cancel_delayed(self, name: str) -> bool:
        """Remove a delayed object; return False if it is not, or no longer, delayed."""
        if self._delayed.pop(name, None) is None:
            return False
        self._memory.pop(name, None)
        if self._disk is not None:
            self._disk.delete(name)
        return True

    @property
    def pending(self) -> int:
        """How many uploads are queued, under way or given up for now; may be a moment old."""
        return len(self._sizes) + len(self._refused) + len(self._delayed)

    def flush(self, timeout_s: float | None) -> FlushReport:
        """Wait until nothing is left that can be uploaded, at most ``timeout_s``: all is tried."""
        return self._wait_for(self._drain(), timeout_s)

    def flush_while_it_works(self, timeout_s: float) -> FlushReport:
        """Flush for the exit: end where uploads pause, and try only some of what was refused."""
        return self._wait_for(self._drain_until_a_pause(), timeout_s)

    def close(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Stop uploading. What is pending on the disk stays so, for others to adopt."""
        self._is_closed = True
        with contextlib.suppress(ClosedError, concurrent.futures.TimeoutError):
            self._loop.wait(self._stop(), timeout_s)

    def _keep_on_disk(self, name: str, data: Buffer) -> None:
        assert self._disk is not None
        self._check_open()
        self._disk.put_pending(name, data)
        self._memory.pop(name, None)  # it is older

    def _keep_in_memory(self, name: str, data: Buffer) -> None:
        self._check_open()
        held = bytes(data)  # the caller may reuse its buffer; bytes are not copied
        with self._mutex:
            others = {each: len(other) for each, other in self._memory.items() if each != name}
            count, size = len(others), sum(others.values())
            if count >= self._max_count or size + len(held) > self._max_bytes:
                problem = f"the upload queue is full: {count} objects of {size} bytes are in memory"
                raise NoSpaceError(problem, op="put", key=name)
            self._memory[name] = held

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the cache was closed")

    def _wait_for(self, work: Coroutine[Any, Any, None], timeout_s: float | None) -> FlushReport:
        error, pending = self._error, set[str]()
        try:
            with contextlib.suppress(concurrent.futures.TimeoutError):
                self._loop.wait(work, timeout_s)
            pending = self._loop.wait(self._pending_on_disk(), _REPORT_TIMEOUT_S)
            error = self._error
        except ClosedError as exc:  # or no thread can be started
            error = exc
            if self._disk is not None:
                with contextlib.suppress(S3CacheError):
                    pending = {*self._disk.pending()}
        except concurrent.futures.TimeoutError:  # the disk or a name server hangs
            pass
        return FlushReport(len(pending | self._known()), len(self._memory), error)

    def _known(self) -> set[str]:
        """Return all that is not uploaded, without asking the disk; for any thread."""
        return {*self._sizes, *self._refused, *self._delayed, *self._memory, *self._arriving}

    # -- on the loop: the queue

    def _enqueue(self, name: str, size: int = 0) -> None:
        self._arriving.discard(name)
        if self._is_stopped:
            return
        self._refused.pop(name, None)
        is_new = name not in self._sizes
        self._sizes[name] = size
        if name in self._active:
            self._put_again.add(name)
        elif is_new:
            self._queue.append(name)
            self._emit("queued", name)
        self._start_tasks()

    def _release(self, *names: str) -> None:
        for name in names:
            if (size := self._delayed.pop(name, None)) is not None:
                self._enqueue(name, size)

    async def _drain_until_a_pause(self) -> None:
        self._release(*self._delayed)
        self._try_some_again()
        await self._until(lambda: self._is_idle() or (self._pause and not self._active))

    async def _drain(self) -> None:
        self._release(*self._delayed)
        self._try_all_again()
        while True:
            refusals = self._refusals
            adopted = await self._look_for_more()
            self._resume()
            await self._until(self._is_idle)
            if not adopted or self._refusals > refusals or self._is_stopped:
                return

    async def _stop(self) -> None:
        self._is_stopped = True
        for timer in (self._pause, self._retry):
            if timer is not None:
                timer.cancel()
        await cancel_all(self._tasks)
        self._wake()

    def _is_idle(self) -> bool:
        return not (self._queue or self._active)

    async def _until(self, condition: Callable[[], object]) -> None:
        while not (self._is_stopped or condition()):
            await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()  # wakes all that wait now
        self._changed.clear()

    # -- on the loop: the work

    def _start_tasks(self) -> None:
        if not (self._tasks or self._is_stopped):
            work = [self._work() for _ in range(self._concurrency)]
            self._tasks = [*map(asyncio.ensure_future, [*work, self._adopt_regularly()])]
        self._wake()

    async def _work(self) -> None:
        while True:
            await self._until(lambda: self._queue and self._pause is None)
            if self._is_stopped:  # the cancellation got lost, see cancel_all()
                return
            name = self._queue.popleft()
            self._active.add(name)
            await self._upload(name)
            self._wake()

    async def _upload(self, name: str) -> None:
        """Try once, and act on the outcome; raise nothing, for a worker must live on."""
        self._emit("started", name)
        try:
            is_there = await self._attempt(name)
        except TransientError as exc:
            self._active.discard(name)
            self._put_again.discard(name)
            self._queue.appendleft(name)
            self._pause_uploads()
            self._fail("retried", name, exc)
            return
        except UntrustedError as exc:
            logger.debug("%s is left to processes that trust its signer: %s", name, exc)
            self._untrusted.add(name)
            await self._give_back(name)
            self._emit("absent", name)
        except Exception as exc:  # noqa: BLE001 - whatever it is, the other uploads go on
            if not isinstance(exc, CorruptError):
                await self._refuse(name, exc)
            self._fail("failed", name, exc)
        else:
            self._error, self.pause_s = None, 0.0
            self._emit("done" if is_there else "absent", name)
            if is_there and name in self._on_trial:
                self.retry_s = 0.0
                self._try_all_again()
        self._active.discard(name)
        self._on_trial.discard(name)
        size = self._sizes.pop(name)
        if name in self._put_again:
            self._put_again.discard(name)
            self._enqueue(name, size)

    async def _attempt(self, name: str) -> bool:
        """Upload the object and forget it; return False if there is none (any more)."""
        held = self._memory.get(name)
        if held is not None:
            try:
                self._may_write |= await self._publish(name, held, None)
            except CorruptError:
                self._forget_in_memory(name, held)
                raise
            self._forget_in_memory(name, held)
            return True
        if self._disk is None:
            return False
        if not self._sizes[name]:
            info = await asyncio.to_thread(self._disk.head, name)
            self._sizes[name] = 0 if info is None else info.size
        size = self._sizes[name]
        await self._reading.take(size)
        try:
            found = await asyncio.to_thread(self._disk.pending_object, name)
            if found is None:
                return False
            data, note = found
            try:
                self._may_write |= await self._publish(name, data, note)
            except CorruptError:  # damaged on our own disk: it is not tried again
                await asyncio.to_thread(self._disk.quarantine, name, data)
                raise
            if not await asyncio.to_thread(self._disk.uploaded, name, data):
                self._put_again.add(name)  # by another process, with other bytes
        finally:
            self._reading.give(size)
        return True

    def _forget_in_memory(self, name: str, data: bytes) -> None:
        with self._mutex:
            if self._memory.get(name) is data:  # it was not replaced
                del self._memory[name]

    def _emit(self, step: Step, name: str, error: Exception | None = None) -> None:
        self._listeners.emit(TransferEvent("upload", step, name, self._sizes[name], error))

    def _fail(self, step: Step, name: str, error: Exception) -> None:
        self._error = error
        self._emit(step, name, error)
        self._on_problem(error)

    def _pause_uploads(self) -> None:
        # Uploads that were under way together fail together: that is one failure.
        if self._pause is None:
            self.pause_s = min(2 * self.pause_s or _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
            self._pause = asyncio.get_running_loop().call_later(self.pause_s, self._resume)

    def _resume(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        self._wake()

    # -- on the loop: what was refused

    async def _refuse(self, name: str, error: Exception) -> None:
        """Keep what is ours to upload for later; give back what was adopted."""
        if not isinstance(error, ConfigError):  # which is about one object
            self._may_write = False
        if await self._give_back(name):
            self._refusals += 1
            self._adopt_at_once = 1
            self._given_back.add(name)
            return
        self._refused[name] = self._sizes[name]
        if self._retry is None and not self._is_stopped:
            self.retry_s = min(2 * self.retry_s or _FIRST_RETRY_S, _LONGEST_RETRY_S)
            loop = asyncio.get_running_loop()
            self._retry = loop.call_later(self.retry_s, self._try_some_again)

    def _try_some_again(self) -> None:
        """Try a few, to see whether the refusal has passed; the one refused last comes last."""
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        for name, size in [*islice(self._refused.items(), self._concurrency)]:
            self._on_trial.add(name)
            self._enqueue(name, size)

    def _try_all_again(self) -> None:
        for name, size in [*self._refused.items()]:
            self._enqueue(name, size)

    # -- on the loop: what is pending on the disk and not queued, ours and that of others

    async def _adopt_regularly(self) -> None:
        while True:
            await self._until(lambda: self._adopts)
            if self._is_stopped:
                return
            refusals = self._refusals
            adopted = await self._look_for_more()
            await self._until(partial(adopted.isdisjoint, self._sizes))
            if not adopted or self._refusals > refusals:
                await asyncio.sleep(_ADOPT_EVERY_S)

    async def _look_for_more(self) -> set[str]:
        """Adopt some of what others have left, and queue all that is pending; return the former."""
        if self._disk is None:
            return set()
        # What was refused comes last, but it does come again.
        but, self._given_back = self._given_back | self._untrusted, set()
        limit = None if self._may_write else self._adopt_at_once
        adopted = await self._ask(partial(self._disk.adopt, limit, but))
        if adopted:
            self._adopt_at_once *= 2
        known = self._known()  # what is no longer known then, is uploaded
        for name in {*(await self._ask(self._disk.pending) or ())} - known - self._known():
            self._enqueue(name)
        return {*(adopted or ())}

    async def _give_back(self, name: str) -> bool:
        """Leave what was adopted to other processes; return False if it is ours."""
        disk = self._disk
        return disk is not None and bool(await self._ask(partial(disk.give_back, name)))

    async def _pending_on_disk(self) -> set[str]:
        return set() if self._disk is None else {*(await self._ask(self._disk.pending) or ())}

    async def _ask(self, call: Callable[[], _T]) -> _T | None:
        """Return what a call of the disk gives, ``None`` if it fails: that may pass."""
        try:
            return await asyncio.to_thread(call)
        except S3CacheError as exc:
            logger.debug("the disk does not say what is pending: %s", exc)  # its users warn of it
        except Exception as exc:  # noqa: BLE001 - the loop's tasks must live on
            self._on_problem(exc)
        return None
