"""Uploads in the background, which survive their process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from s3cache.errors import (
    ClosedError,
    ConfigError,
    CorruptError,
    NoSpaceError,
    S3CacheError,
    TooLargeError,
    TransientError,
    UntrustedError,
)
from s3cache.settings import Settings
from s3cache.stats import Listeners, Step
from s3cache.store import Buffer
from s3cache.tier._disk import DiskTier
from s3cache.tier._remote import SMALL_BYTES, BackgroundLoop, cancel_all
from s3cache.util.logs import logger_of
from s3cache.util.text import pointer

# The pause of all uploads after a failure; it doubles with each further one. Meanwhile the server,
# the credentials, the clock, the bucket or the free space may be repaired.
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
# How often a process looks for uploads of dead processes.
_ADOPT_EVERY_S = 60.0
# While uploads succeed, each look adopts twice as many, because a look reads all names.
_ADOPTED_AT_MOST = 512

logger = logger_of("storage")


@dataclass(frozen=True, slots=True)
class FlushReport:
    """The uploads that remain after a flush.

    Attributes:
        remaining: objects that are not uploaded yet; a later process uploads those on the disk.
        in_memory: how many of them are in memory only, and lost when this process ends.
        error: the error of the last failed upload since the last success, if any.
        too_large: entries of this process that the server or a proxy refuses for their size; they
            stay on this machine only.
        vanished: entries of this process that were removed from the disk before their upload, such
            as by a cleaner of temporary files; they are lost.
    """

    remaining: int
    in_memory: int
    error: Exception | None
    too_large: int = 0
    vanished: int = 0

    @property
    def complete(self) -> bool:
        return self.remaining == self.too_large == self.vanished == 0


class Uploads:
    """A queue of names to upload, and its workers on the background loop.

    The bytes are pending on the disk, or in memory and lost with the process. After a failure all
    uploads pause, and the failed one moves to the end. Uploads of dead processes are adopted, a few
    at a time; those that this process cannot upload are given back.

    ``verify`` gets the bytes and whether another process saved them, and returns the object; it
    runs on any thread. ``publish`` uploads the object, and returns whether to give it up.
    ``on_problem`` is called on the loop's thread with each error that ends an attempt, and
    ``before_flush`` before a flush tries all uploads.
    """

    def __init__(
        self,
        loop: BackgroundLoop,
        settings: Settings,
        listeners: Listeners,
        disk: DiskTier | None,
        *,
        verify: Callable[[str, Buffer, bool], Any],
        publish: Callable[[str, Any], Awaitable[object]],
        on_problem: Callable[[Exception], None],
        before_flush: Callable[[], None],
    ) -> None:
        self._loop, self._verify, self._publish = loop, verify, publish
        self._settings, self._disk, self._listeners = settings, disk, listeners
        self._on_problem, self._before_flush = on_problem, before_flush
        self._is_closed = False
        self._memory: dict[str, bytes] = {}  # objects that are not on the disk
        self._mutex = threading.Lock()
        # Uploads that wait for a delay. The thread that removes a name decides about it.
        self._delayed: dict[str, bool] = {}
        self._saving: list[str] = []  # names on their way to the disk, see saving()
        # Used on the loop only. A name that is saved again during its upload is in both.
        self._waiting: dict[str, None] = {}
        self._active: set[str] = set()
        self._refused: set[str] = set()  # waiting, but refused since the last pause or flush
        self._given_back: set[str] = set()  # adopted and refused: left to others until we look
        self._untrusted: set[str] = set()  # adopted, but we must never upload them
        self._too_large: set[str] = set()  # given up
        self._uploaded: dict[str, Buffer] = {}  # uploaded, with a record still on the disk
        self._removing = asyncio.Lock()
        self._adopting = asyncio.Lock()
        self._moving = asyncio.Lock()  # keeps us from adopting at once what we give back
        self._adopts_at_once = settings.upload_concurrency
        self._adopts = True  # no adopted upload was refused since the last look
        self._flushes = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._error: Exception | None = None
        self._pause: asyncio.TimerHandle | None = None
        self._warned_of = 0  # vanished entries
        self.pause_s = 0.0  # the pause after the last failure; the next failure doubles it

    # -- on the caller's thread

    def start(self, names: Iterable[str] = ()) -> None:
        """Begin to upload ``names``, which are pending, and uploads of dead processes."""
        with contextlib.suppress(ClosedError):
            self._loop.call(self._start_tasks)
            for name in names:
                self._loop.call(self._queue, name)

    @contextlib.contextmanager
    def saving(self, name: str) -> Iterator[None]:
        """Keep the search for pending uploads from queueing ``name``, which the block adds.

        Otherwise it could find the record on the disk first, and upload the object without delay.
        """
        self._saving.append(name)
        try:
            yield
        finally:
            self._saving.remove(name)

    def add(self, name: str, data: Buffer | None = None, *, delay_s: float = 0.0) -> None:
        """Queue an object that is pending on the disk, or keep a copy of ``data`` in memory.

        With ``delay_s``, queue it later or at a flush, unless it is cancelled before. Raises
        StoreError if there is no room in memory, and ClosedError if it can no longer be uploaded.
        """
        if data is None:
            self._memory.pop(name, None)  # an older version
        elif self._is_closed:
            raise ClosedError("the cache was closed")
        else:
            most = self._settings
            with self._mutex:
                others = [len(of) for other, of in self._memory.items() if other != name]
                count, size = len(others), sum(others)
                is_full = size + memoryview(data).nbytes > most.upload_queue_max_bytes
                if is_full or count >= most.upload_queue_max_count:
                    problem = (
                        f"the upload queue is full: {count} objects of {size} bytes are in memory"
                    )
                    raise NoSpaceError(problem, op="put", key=name)
                self._memory[name] = bytes(data)  # the caller may reuse its buffer
        self._delayed[name] = True
        try:
            self._loop.call(self._release, name, delay_s)
        except ClosedError:  # a later process uploads it from the disk
            if data is not None:
                self._memory.pop(name, None)
                raise

    def cancel_delayed(self, name: str) -> bool:
        """Remove a delayed object; return False if it is not delayed (any more)."""
        if not self._delayed.pop(name, False):
            return False
        self._memory.pop(name, None)
        if self._disk is not None:
            self._disk.delete(name)
        return True

    @property
    def pending(self) -> int:
        """The number of uploads that are queued, delayed or running; may be a moment old."""
        return len({*self._waiting, *self._active, *self._delayed})

    def flush(self, timeout_s: float | None, *, until_a_pause: bool = False) -> FlushReport:
        """Wait at most ``timeout_s`` until every upload was tried.

        It cuts a pause short. With ``until_a_pause``, for the exit, it ends at the next pause.
        """
        pending, vanished = set[str](), 0
        error: Exception | None = None
        try:
            with contextlib.suppress(concurrent.futures.TimeoutError):
                self._loop.wait(self._flush(until_a_pause), timeout_s)
        except ClosedError as exc:  # closed, or no thread can be started
            error = exc
        if (disk := self._disk) is not None:
            with contextlib.suppress(S3CacheError):
                pending = {*disk.pending()}
            if (vanished := disk.vanished) > self._warned_of:
                self._warned_of = vanished
                logger.warning(
                    "saved entries that vanished from %s before their upload, and are lost: %d; "
                    "another program removed them: set local_dir to a directory that no cleaner of "
                    "temporary files empties %s", disk.root, vanished, pointer("local-directory")
                )  # fmt: skip
        remaining, in_memory = len(pending | self._known()), len(self._memory)
        error = error or self._error
        return FlushReport(remaining, in_memory, error, len(self._too_large), vanished)

    def close(self, timeout_s: float) -> None:
        """Stop uploading. Pending uploads stay on the disk for others to adopt."""
        self._is_closed = True
        with contextlib.suppress(ClosedError, concurrent.futures.TimeoutError):
            self._loop.wait(self._stop(), timeout_s)

    def _known(self) -> set[str]:
        """Return all names that are not uploaded, without reading the disk; any thread."""
        return {*self._waiting, *self._active, *self._delayed, *self._memory}

    # -- on the loop

    def _queue(self, name: str) -> None:
        for names in (self._given_back, self._untrusted, self._refused):
            names.discard(name)  # this version is new and ours
        if name not in self._waiting:  # even after a close: it stays pending
            self._waiting[name] = None
            self._emit("queued", name)
        self._start_tasks()

    def _release(self, name: str, delay_s: float = 0.0) -> None:
        if delay_s:
            asyncio.get_running_loop().call_later(delay_s, self._release, name)
        elif self._delayed.pop(name, False):
            self._queue(name)

    async def _flush(self, until_a_pause: bool) -> None:
        for name in [*self._delayed]:
            self._release(name)
        self._given_back.clear()
        self._flushes += 1
        try:
            self._before_flush()
            self._resume()
            if until_a_pause:
                await self._until(lambda: self._is_idle() or (self._pause and not self._active))
                return
            self._start_tasks()
            begun = {*self._active}  # began before the flush; if refused, they are tried again
            await self._until(lambda: begun.isdisjoint(self._active))
            self._refused -= begun
            self._given_back -= begun
            self._wake()
            while await self._adopt_some():
                pass
        finally:
            self._flushes -= 1
            if self._refused:
                self._pause_uploads()

    async def _stop(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
        await cancel_all(self._tasks)
        self._wake()

    def _is_idle(self) -> bool:
        return not self._active and self._waiting.keys() <= self._refused

    async def _until(self, condition: Callable[[], object]) -> None:
        while not (self._is_closed or condition()):
            await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()  # wakes all current waiters
        self._changed.clear()

    def _start_tasks(self) -> None:
        if not (self._tasks or self._is_closed):
            work = [self._work() for _ in range(self._settings.upload_concurrency)]
            self._tasks = [*map(asyncio.ensure_future, [*work, self._adopt_regularly()])]
        self._wake()

    async def _work(self) -> None:
        while True:
            await self._until(lambda: self._pause is None and self._next())
            if self._is_closed:  # the cancellation was lost, see cancel_all()
                return
            name = self._next()
            del self._waiting[name]
            self._active.add(name)
            await self._upload(name)
            self._active.discard(name)
            self._wake()

    def _next(self) -> str:
        put_off = self._active | self._refused
        return next((name for name in self._waiting if name not in put_off), "")

    async def _upload(self, name: str) -> None:
        """Try once and act on the outcome; raise nothing, because the worker must go on."""
        self._emit("started", name)
        try:
            size = await self._attempt(name)
        except TransientError as exc:
            self._waiting[name] = None
            self._pause_uploads()
            self._emit("retried", name, error=exc)
        except Exception as exc:  # noqa: BLE001 - whatever it is, the other uploads go on
            if not isinstance(exc, (CorruptError, TooLargeError)):
                if not await self._give_back(name):
                    self._waiting[name] = None
                    self._refused.add(name)
                    if not self._flushes:  # a flush tries all uploads
                        self._pause_uploads()
                elif isinstance(exc, UntrustedError):
                    self._untrusted.add(name)
                    self._emit("absent", name)
                    return
                else:  # unless the reason is a missing key, other uploads would be refused too
                    self._adopts &= isinstance(exc, ConfigError)
            self._emit("failed", name, error=exc)
        else:
            if size is not None:
                self._error, self.pause_s = None, 0.0
            self._emit("absent" if size is None else "done", name, size or 0)

    async def _attempt(self, name: str) -> int | None:
        """Upload the object and forget it; return its size, or None if it was not uploaded."""
        disk, held = self._disk, self._memory.get(name)
        data, is_adopted, entry = held, False, None
        if data is None and disk is not None:
            data, is_adopted, entry = await disk.deadline.run(lambda: self._read(disk, name))
        if data is None:
            return None
        final: Exception | None = None  # an error after which no upload is tried again
        is_given_up: object = False
        try:
            if entry is None:
                entry = await asyncio.to_thread(self._verify, name, data, is_adopted)
            is_given_up = await self._publish(name, entry)
        except (CorruptError, TooLargeError) as exc:
            final = exc
        self._too_large.discard(name)
        if isinstance(final, TooLargeError):
            self._too_large.add(name)
        if disk is None or held is not None:
            with self._mutex:
                if self._memory.get(name) is held:  # not replaced meanwhile
                    del self._memory[name]
        elif isinstance(final, CorruptError):
            await disk.deadline.run(lambda: disk.delete(name, data))
        else:
            await self._remove_record(disk, name, data)
        if final is not None:
            raise final
        return None if is_given_up else len(data)

    async def _remove_record(self, disk: DiskTier, name: str, data: Buffer) -> None:
        """Remove the record from the disk, in one call with all others that wait for its lock."""
        self._uploaded[name] = data
        try:
            async with self._removing:
                if name in self._uploaded:  # else another call has removed it
                    together = {**self._uploaded}
                    replaced = await disk.deadline.run(lambda: disk.forget_uploaded(together))
                    for removed in together:
                        self._uploaded.pop(removed, None)
                    for pending in replaced:  # by other bytes
                        self._queue(pending)
        finally:
            self._uploaded.pop(name, None)

    def _read(self, disk: DiskTier, name: str) -> tuple[bytes | None, bool, Any]:
        """Return the bytes, whether they are adopted, and the entry if it is small and sound."""
        data, is_adopted = disk.pending_object(name) or (None, False)
        entry = None
        if data is not None and len(data) <= SMALL_BYTES:
            with contextlib.suppress(S3CacheError):
                entry = self._verify(name, data, is_adopted)
        return data, is_adopted, entry

    def _emit(self, step: Step, name: str, size: int = 0, error: Exception | None = None) -> None:
        self._listeners.emit("upload", step, name, size, error)
        if error is not None:
            self._error = error
            self._on_problem(error)

    def _pause_uploads(self) -> None:
        # Concurrent uploads fail together: count that as one failure.
        if self._pause is None and not self._is_closed:
            self.pause_s = min(2 * self.pause_s or _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
            self._pause = asyncio.get_running_loop().call_later(self.pause_s, self._resume)

    def _resume(self) -> None:
        self._refused.clear()
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        self._wake()

    # -- on the loop: uploads that are pending on the disk and not queued, ours and others'

    async def _adopt_regularly(self) -> None:
        while not self._is_closed:
            if self._flushes or not await self._adopt_some():  # a flush adopts too
                await asyncio.sleep(_ADOPT_EVERY_S)
                self._given_back.clear()

    async def _adopt_some(self) -> bool:
        """Upload our pending objects and some of dead processes; return whether to go on."""
        async with self._adopting:
            adopted = set[str]()
            if (disk := self._disk) is not None:
                queued = self._known()  # names that leave this set are uploaded
                limit = self._adopts_at_once
                self._adopts = not self._refused
                async with self._moving:
                    but = self._given_back | self._untrusted
                    if self._adopts:
                        adopted = await self._ask(lambda: disk.adopt(limit, but))
                pending = adopted or await self._ask(disk.pending)
                # Read in this order: a name goes from the first set to the second.
                for name in pending - queued - {*self._saving} - self._known():
                    self._queue(name)
            # Adopt more as soon as all uploads have begun: workers must not be idle.
            await self._until(lambda: self._waiting.keys() <= self._refused)
            if adopted and self._adopts and not self._is_closed:
                self._adopts_at_once = min(2 * self._adopts_at_once, _ADOPTED_AT_MOST)
                return True
            self._adopts_at_once = self._settings.upload_concurrency
            await self._until(self._is_idle)
            return False

    async def _give_back(self, name: str) -> bool:
        """Give an adopted upload back to other processes; return False if it is ours."""
        async with self._moving:
            disk, returned = self._disk, set[str]()
            if disk is not None:
                returned = await self._ask(lambda: [name] if disk.give_back(name) else [])
            self._given_back |= returned
            return bool(returned)

    async def _ask(self, call: Callable[[], list[str]]) -> set[str]:
        """Return the names that a call of the disk returns; none if it fails, perhaps briefly."""
        try:
            return {*await asyncio.to_thread(call)}
        except S3CacheError as exc:
            logger.debug("pending uploads cannot be listed: %s", exc)  # users of the disk warn
        except Exception as exc:  # noqa: BLE001 - the loop's tasks must live on
            self._on_problem(exc)
        return set()
