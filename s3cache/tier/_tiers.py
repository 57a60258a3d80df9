"""The two tiers as a cache uses them: a disk that may fail, and a remote store."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from s3cache import entries, frame
from s3cache.entries import Replaceable
from s3cache.errors import (
    ClosedError,
    ConfigError,
    CorruptError,
    DownloadTimeoutError,
    NoSpaceError,
    PreconditionError,
    S3CacheError,
    StoreError,
    TruncatedError,
    UntrustedError,
)
from s3cache.frame import Frame, TrustCheck
from s3cache.settings import Settings
from s3cache.stats import Counters, Listeners, TransferEvent, Verb, VerbStats
from s3cache.store import (
    AcceptSize,
    BreakingStore,
    Buffer,
    MeteredStore,
    NotAccepted,
    ObjectInfo,
    PutMode,
    RetryingStore,
    RetryPolicy,
    Store,
)
from s3cache.tier._disk import DiskTier
from s3cache.tier._loop import Deadline, Prefetch, Prefetches, background, cancel_all
from s3cache.tier._uploads import Uploads
from s3cache.util.logs import Problems
from s3cache.util.threads import Breaker

__all__ = ["LocalTier", "RemoteTier", "TierStore"]

_T = TypeVar("_T")
_U = TypeVar("_U")

# A disk that failed is not used for so long: meanwhile there may be room again.
_REST_S = 60.0
_BASE_DELAY_S = 0.1
_MAX_DELAY_S = 10.0
_CLOSE_TIMEOUT_S = 5.0
_REMOVED_AT_ONCE = 16
# A server that was down is waited for so long; what comes later lands on the disk all the same. So
# is one that has been silent for as long in all as the second says.
_PROBE_WAIT_S = 0.5
SILENCE_AT_MOST_S = 20.0
# The signature of a larger entry is read first.
_USUAL_BYTES = 8 << 20
# A writer can put any number of objects under a key.
_LISTED_AT_MOST = 10_000


class LocalTier:
    """A disk tier that is not used for a minute after it failed.

    While it is not used, or there is none, it looks empty and full. What fails is not raised,
    unless the cache is strict.

    Attributes:
        check_trust: checks signatures, if there is a policy.
        disk: the tier itself, which raises what fails; ``None`` if there is none.
        error: why it could not be read or written the last time, if it could not.
    """

    def __init__(
        self,
        disk: DiskTier | None,
        counters: Counters,
        problems: Problems,
        check_trust: TrustCheck | None = None,
    ) -> None:
        self.disk = disk
        self.error: Exception | None = None
        self.check_trust = check_trust
        self._counters = counters
        self._problems = problems
        self._unread_until = self._unwritten_until = 0.0

    @property
    def read_error(self) -> Exception | None:
        """Why nothing is read for now, if reading failed just now."""
        return self.error if time.monotonic() < self._unread_until else None

    @property
    def is_writable(self) -> bool:
        """Whether there is a disk, and writing it did not fail just now."""
        return self.disk is not None and time.monotonic() >= self._unwritten_until

    def search(self, key: str, names: Sequence[str]) -> tuple[str, bytes] | list[ObjectInfo]:
        """Return the first of ``names`` with its unverified bytes, or all there is of ``key``."""
        return self.read(lambda disk: disk.search(names, entries.name_prefix(key)), [])

    def load(self, name: str) -> Frame | None:
        """Return the entry at ``name``, or ``None``; see :meth:`verify`."""
        data = self.read(lambda disk: disk.get(name), None)
        return None if data is None else self.verify(name, data)

    def verify(self, name: str, data: bytes) -> Frame:
        """Return the entry that was read from ``name``; set it aside and raise if it is damaged.

        One that is not trusted stays, as others may trust its signer.
        """
        try:
            return entries.verify(name, data, admit=self.check_trust)
        except CorruptError:
            self._quarantine(name)
            raise

    def holds(self, name: str) -> bool:
        """Return whether there is something at ``name``, whatever it is."""
        return self.read(lambda disk: disk.holds(name), False)

    def read(self, read: Callable[[DiskTier], _T], otherwise: _U) -> _T | _U:
        """Return what ``read`` gives, or ``otherwise`` where there is no disk or it fails."""
        if self.disk is None or time.monotonic() < self._unread_until:
            return otherwise
        try:
            return read(self.disk)
        except S3CacheError as exc:
            self.error = exc
            self._unread_until = self._unwritten_until = time.monotonic() + _REST_S
            self._problems.met("local", "the local tier fails and is not used for now", exc)
            return otherwise

    def write(self, write: Callable[[DiskTier], object]) -> bool:
        """Let ``write`` change the disk; return whether there is one, and it did not fail."""
        if self.disk is None or not self.is_writable:
            return False
        try:
            write(self.disk)
        except (StoreError, ConfigError) as exc:
            self._write_failed(exc)
            return False
        self.error = None
        return True

    def _write_failed(self, error: S3CacheError) -> None:
        """Write nothing for a while; what is there can still be read."""
        self.error = error
        if isinstance(error, NoSpaceError) and error.__cause__ is None:
            # It is the bounds that leave no room, not the disk: the next entry may fit.
            self._problems.met("bound", "the local tier is too small for this entry", error)
            return
        self._unwritten_until = time.monotonic() + _REST_S
        self._problems.met("local", "the local tier cannot be written and is left as it is", error)

    def set_aside(self, entry: Frame) -> None:
        """Quarantine every copy of an entry that was loaded from here."""
        for name in entries.names_of(entry.header):
            with contextlib.suppress(CorruptError, UntrustedError):
                there = self.load(name)
                if there is not None and there.digest == entry.digest:
                    self._quarantine(name)

    def _quarantine(self, name: str) -> None:
        if self.disk is not None:
            self._counters.set_aside("local")
            try:
                self.disk.quarantine(name)
            except S3CacheError as exc:
                self._write_failed(exc)


class RemoteTier:
    """The entries of one remote store, and all transfers between it and this process.

    Everything that waits for the network happens on the background loop. Methods may be called
    from any thread but the loop's own. What they need raises ``S3CacheError``.

    Args:
        store: the bare store; this object closes it.
        disk: where downloads land, and where uploads are recorded.
        replaceable: what an upload may overwrite; damage found here is added.
    """

    def __init__(
        self,
        store: Store,
        settings: Settings,
        *,
        disk: LocalTier,
        replaceable: Replaceable,
        counters: Counters,
        listeners: Listeners,
        problems: Problems,
    ) -> None:
        self._check_trust = disk.check_trust
        self._store = store
        self._counters = counters
        self._listeners = listeners
        self._problems = problems
        self._replaceable = replaceable
        self._loop = background()
        self._metered = MeteredStore(store)
        reads = RetryPolicy(
            attempts=settings.retry_attempts,
            total_timeout_s=settings.retry_timeout_s,
            attempt_timeout_s=settings.attempt_timeout_s,
            base_delay_s=_BASE_DELAY_S,
            max_delay_s=_MAX_DELAY_S,
        )
        writes = replace(
            reads,
            total_timeout_s=settings.upload_timeout_s,
            attempt_timeout_s=settings.upload_timeout_s,
        )
        self._reader = BreakingStore(
            RetryingStore(self._metered, reads),
            Breaker(settings.breaker_failures, settings.breaker_reset_s),
        )
        # No breaker: what cannot be uploaded now is kept, and tried again after a pause.
        self._writer = RetryingStore(self._metered, writes)
        self._disk = disk
        # Touched on the loop only.
        self._downloads: dict[str, asyncio.Task[Frame | NotAccepted | None]] = {}
        self._stopped = False
        # How long callers have waited for the server since its last answer, and until when.
        self._silence_s = self._silent_until = 0.0
        self._prefetches = Prefetches(
            self._loop,
            self._join,
            concurrency=settings.download_concurrency,
            max_bytes=settings.prefetch_max_bytes,
            present=disk.holds,
        )
        self.uploads = Uploads(
            self._loop,
            self._publish,
            disk=disk.disk,
            concurrency=settings.upload_concurrency,
            max_count=settings.upload_queue_max_count,
            max_bytes=settings.upload_queue_max_bytes,
            listeners=listeners,
            on_problem=self._upload_failed,
        )

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def breaker(self) -> str:
        """The state of the circuit breaker before reads."""
        return self._reader.state

    def statistics(self) -> Mapping[Verb, VerbStats]:
        """Return the requests to the store by verb, single attempts."""
        return self._metered.snapshot()

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
        return self._prefetches.start(names)

    def exit_wait_s(self, at_most: float) -> float:
        """Return how long the exit waits for this server: less if it has been silent."""
        left_s = SILENCE_AT_MOST_S - self._silence_s
        return min(at_most, max(left_s, _PROBE_WAIT_S))

    def remove(self, prefix: str) -> list[str]:
        """Delete all objects with ``prefix``; return their names."""
        return self._loop.wait(self._remove(prefix), None)

    def close(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Stop and release the connections; what is not uploaded stays pending."""
        deadline = Deadline(timeout_s)
        self.uploads.close(timeout_s)
        with contextlib.suppress(ClosedError, concurrent.futures.TimeoutError):
            self._loop.wait(self._stop(), deadline.left_s)
        with contextlib.suppress(Exception):
            self._loop.wait(self._store.aclose(), deadline.left_s)

    def _wait(self, work: Coroutine[Any, Any, _T], name: str, timeout_s: float) -> _T:
        if self.breaker != "closed":  # the server was down: do not wait long for the next probe
            timeout_s = min(timeout_s, _PROBE_WAIT_S)
        began = time.monotonic()
        try:
            return self._loop.wait(work, timeout_s)
        except concurrent.futures.TimeoutError:
            now = time.monotonic()  # two threads that wait at once wait as long as one
            self._silence_s += now - max(began, self._silent_until)
            self._silent_until = now
            # A try at a server that never answers takes minutes, longer than a caller waits.
            with contextlib.suppress(ClosedError):
                self._loop.call(self._reader.give_up)
            raise DownloadTimeoutError(
                f"no answer within {timeout_s:.3g} s", op="get", key=name
            ) from None

    # -- on the loop: downloads

    async def _load_verified(self, name: str, *, suspect: bool) -> Frame | None:
        """Download what a caller waits for, however much memory downloads take already."""
        if self._check_trust is not None:
            if not suspect:
                answer = await self._join(name, lambda size: size <= _USUAL_BYTES)
                if not isinstance(answer, NotAccepted):
                    return answer
            if not await self._has_trusted_head(name, self._check_trust):
                return None
        while isinstance(answer := await self._join(name), NotAccepted):
            pass
        return answer

    async def _has_trusted_head(self, name: str, check_trust: TrustCheck) -> bool:
        """Check the head of an entry alone; return False if there is no entry."""
        length = frame.HEADER_HINT_BYTES
        while True:
            data = await self._reader.get_range(name, 0, length)
            if data is None:
                return False
            try:
                frame.decode_head(data, admit=check_trust)
            except TruncatedError as exc:
                if exc.needed <= length:  # all of it is shorter
                    raise
                length = exc.needed
            else:
                return True

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
            self._silence_s = 0.0
            if isinstance(data, NotAccepted):  # it will be started again
                return data
            entry = None if data is None else await asyncio.to_thread(self._land, name, data)
        except Exception as exc:
            self._listeners.emit(TransferEvent("download", "failed", name, error=exc))
            raise
        if entry is None:
            self._listeners.emit(TransferEvent("download", "absent", name))
        else:
            self._listeners.emit(TransferEvent("download", "done", name, entry.size))
        return entry

    def _land(self, name: str, data: Buffer) -> Frame:
        """Verify the entry that came as ``data``, and keep it on the disk if there is room.

        If it is damaged, the next one that is saved here replaces it in the remote.
        """
        try:
            entry = entries.verify(name, data, admit=self._check_trust)
        except CorruptError:
            self._counters.set_aside("remote")
            with contextlib.suppress(CorruptError):  # an upload sees a damaged header by itself
                self._replaceable.add(frame.decode_head(data).digest)
            raise
        self._disk.write(lambda disk: disk.put(name, data))
        return entry

    async def _list(self, key: str) -> list[str]:
        first, prefix = entries.first_name(key), entries.name_prefix(key)
        present = []
        async for info in self._reader.list(prefix):
            if info.key.startswith(prefix):
                present.append(info)
            if len(present) >= _LISTED_AT_MOST:
                break
        self._silence_s = 0.0
        present.sort(key=lambda info: info.modified, reverse=True)
        return [info.key for info in present if info.key != first]

    async def _remove(self, prefix: str) -> list[str]:
        listed = self._writer.list(prefix)
        names = [info.key async for info in listed if info.key.startswith(prefix)]
        limit = asyncio.Semaphore(_REMOVED_AT_ONCE)

        async def remove(name: str) -> None:
            async with limit:
                await self._writer.delete(name)

        # All of them end before the first error is raised: nothing goes on after that.
        for failed in await asyncio.gather(*map(remove, names), return_exceptions=True):
            if failed is not None:
                raise failed
        return names

    async def _stop(self) -> None:
        self._stopped = True
        await cancel_all([*self._prefetches.running, *self._downloads.values()])

    # -- on the loop: uploads

    async def _publish(self, name: str, data: Buffer, note: bytes | None) -> bool:
        # What this process saved is uploaded whether it trusts it or not: a job may sign for others
        # what it does not use. The signature of what others left is checked before it is parsed.
        admit = None if note is None else self._check_trust
        entry = await asyncio.to_thread(entries.verify, name, data, admit=admit)
        is_written = await entries.publish(
            self._writer, entry, replaceable=self._replaceable, admit=self._check_trust
        )
        self._silence_s = 0.0
        return is_written

    def _upload_failed(self, error: Exception) -> None:
        self._counters.upload_failed()
        self._problems.warn("upload", "an upload failed", error)


class TierStore(Store):
    """A store of what a disk tier holds: reading is no use of it, and closing closes the tier."""

    def __init__(self, tier: DiskTier) -> None:
        self._tier = tier

    @property
    def url(self) -> str:
        return self._tier.url

    async def get(self, key: str, accept_size: AcceptSize | None = None) -> Any:
        data = await asyncio.to_thread(self._tier.peek, key)
        if data is None or accept_size is None or accept_size(len(data)):
            return data
        return NotAccepted(len(data))

    async def get_range(self, key: str, start: int, length: int) -> Buffer | None:
        return await asyncio.to_thread(self._tier.peek, key, start, length)

    async def head(self, key: str) -> ObjectInfo | None:
        return await asyncio.to_thread(self._tier.head, key)

    async def put(
        self,
        key: str,
        data: Buffer,
        *,
        mode: PutMode = "overwrite",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        if mode == "create" and await asyncio.to_thread(self._tier.holds, key):
            raise PreconditionError("already exists", op="put", store=self.url, key=key)
        await asyncio.to_thread(self._tier.put, key, data)

    async def delete(self, key: str) -> None:
        await asyncio.to_thread(self._tier.delete, key)

    async def list_page(
        self, prefix: str, after: str | None = None
    ) -> tuple[Sequence[ObjectInfo], str | None]:
        return [*await asyncio.to_thread(self._tier.objects, prefix)], None

    async def recorded(self) -> set[str]:
        """Return the names that are still to be uploaded."""
        return await asyncio.to_thread(self._tier.recorded)

    async def atomic_create(self) -> bool:
        return False

    async def aclose(self) -> None:
        await asyncio.to_thread(self._tier.close)
