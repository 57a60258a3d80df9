"""Try again what may succeed a moment later, within a bound on attempts and on time."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from tenacity import (
    AsyncRetrying,
    retry_if_exception,
    stop_after_attempt,
    stop_before_delay,
    wait_random_exponential,
)

from s3cache.errors import (
    CircuitOpenError,
    ConfigError,
    PreconditionError,
    StoreError,
    TransientError,
)
from s3cache.store._base import Buffer, ObjectInfo, PutMode, Store
from s3cache.store._wrapper import WrapperStore, close_listing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Mapping

__all__ = ["RetryPolicy", "RetryingStore"]

_T = TypeVar("_T")

# Items of a listing fetched by one retried call: a page of S3.
_BATCH_OBJECTS = 1_000


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long to keep trying.

    Attributes:
        attempts: tries in all, the first one included.
        total_timeout_s: seconds from the first try to giving up, pauses and the running attempt
            included: that one is cut off.
        attempt_timeout_s: seconds after which one attempt is cut off.
        base_delay_s: the pause before try ``n + 1`` is drawn from ``[0, base_delay_s * 2**(n-1)]``
            ("full jitter": clients that failed together do not come back together,
            https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/).
        max_delay_s: no pause is longer.

    Raises:
        ConfigError: ``attempts`` is less than 1, a time-out not positive or a delay negative.
    """

    attempts: int
    total_timeout_s: float
    attempt_timeout_s: float
    base_delay_s: float
    max_delay_s: float

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ConfigError(f"attempts={self.attempts}", "is less than 1", "give 1 or more")
        for name in ("total_timeout_s", "attempt_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(
                    f"{name}={getattr(self, name)}", "is not positive", "give seconds"
                )
        for name in ("base_delay_s", "max_delay_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name}={getattr(self, name)}", "is negative", "give seconds")


class RetryingStore(WrapperStore):
    """Repeats calls that raise :class:`~s3cache.errors.TransientError`, as ``policy`` says.

    The error that ends it is the last attempt's own, with ``attempts`` and ``elapsed_s`` filled
    in. An attempt that takes too long is cancelled and counts as a ``TransientError``.

    ``CircuitOpenError`` is not retried: a breaker raises it to spare the caller the wait, and it
    stays open for longer than any sensible pause.

    ``put(mode="create")`` whose answer was lost finds its own object when it tries again. After a
    failed attempt, then, an object that is there with the same bytes counts as written; one with
    other bytes raises :class:`~s3cache.errors.PreconditionError`. Two writers of the same bytes
    may so both be told they succeeded.

    ``list`` yields each object once, whatever fails: it begins again and passes over the keys it
    has seen, which it remembers. ``policy`` bounds each batch of 1,000 objects, not the whole
    listing, and the consumer's own time does not count.
    """

    def __init__(self, inner: Store, policy: RetryPolicy) -> None:
        super().__init__(inner)
        self.policy = policy
        self._knows_atomic = False

    async def get(self, key: str) -> Buffer | None:
        return await self._retry("get", key, lambda: self.inner.get(key))

    async def get_range(self, key: str, start: int, length: int) -> Buffer | None:
        return await self._retry("get_range", key, lambda: self.inner.get_range(key, start, length))

    async def head(self, key: str) -> ObjectInfo | None:
        return await self._retry("head", key, lambda: self.inner.head(key))

    async def put(
        self,
        key: str,
        data: Buffer,
        *,
        mode: PutMode = "overwrite",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        tried_before = False

        async def attempt() -> None:
            nonlocal tried_before
            ambiguous, tried_before = tried_before, True
            try:
                await self.inner.put(key, data, mode=mode, metadata=metadata)
            except PreconditionError:
                if not (ambiguous and await self._holds(key, data)):
                    raise

        await self._retry("put", key, attempt)

    async def delete(self, key: str) -> None:
        await self._retry("delete", key, lambda: self.inner.delete(key))

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        batches = _Batches(self.inner, prefix)
        try:
            while True:
                await self._retry("list", prefix, batches.fill)
                if not batches.ready:
                    return
                while batches.ready:
                    yield batches.ready.popleft()
        finally:
            await batches.aclose()

    async def atomic_create(self) -> bool:
        if not self._knows_atomic:
            answer = await self._retry("atomic_create", "", self.inner.atomic_create)
            self._knows_atomic = True
            return answer
        return await self.inner.atomic_create()  # from memory; asked before every upload

    async def _holds(self, key: str, data: Buffer) -> bool:
        info = await self.inner.head(key)
        if info is None or info.size != memoryview(data).nbytes:
            return False
        found = await self.inner.get(key)
        return found is not None and bytes(found) == bytes(data)

    async def _retry(self, op: str, key: str, call: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        policy = self.policy
        started = time.monotonic()
        attempts = 0

        async def attempt() -> _T:
            nonlocal attempts
            attempts += 1
            left_s = started + policy.total_timeout_s - time.monotonic()
            timeout_s = min(policy.attempt_timeout_s, left_s)
            try:
                return await _within(timeout_s, call())
            except asyncio.TimeoutError:
                raise TransientError(
                    f"no answer within {max(timeout_s, 0.0):.3g} s", op=op, store=self.url, key=key
                ) from None

        async def again(failures: list[StoreError]) -> _T:
            if failures:  # what tenacity takes for the first attempt is the one already made
                raise failures.pop()
            return await attempt()

        try:
            try:
                return await attempt()  # it nearly always is the only one
            except StoreError as error:
                if not _worth_retrying(error):
                    raise
                return cast("_T", await self._retrying(started)(again, [error]))
        except StoreError as error:
            error.attempts = attempts
            error.elapsed_s = time.monotonic() - started
            raise

    def _retrying(self, started: float) -> AsyncRetrying:
        # One object for each call: an AsyncRetrying keeps the state of its current iteration in
        # a threading.local, which tasks on one loop would share.
        policy = self.policy
        left_s = started + policy.total_timeout_s - time.monotonic()
        return AsyncRetrying(
            retry=retry_if_exception(_worth_retrying),
            stop=stop_after_attempt(policy.attempts) | stop_before_delay(left_s),
            wait=wait_random_exponential(multiplier=policy.base_delay_s, max=policy.max_delay_s),
            reraise=True,
        )


if sys.version_info >= (3, 11):

    async def _within(timeout_s: float, work: Coroutine[Any, Any, _T]) -> _T:
        # Unlike wait_for, it makes no task.
        async with asyncio.timeout(timeout_s):
            return await work

else:

    async def _within(timeout_s: float, work: Coroutine[Any, Any, _T]) -> _T:
        return await asyncio.wait_for(work, timeout_s)


def _worth_retrying(error: BaseException) -> bool:
    return isinstance(error, TransientError) and not isinstance(error, CircuitOpenError)


class _Batches:
    """A listing in batches that keeps what it has when it has to begin again."""

    def __init__(self, store: Store, prefix: str) -> None:
        self.ready: deque[ObjectInfo] = deque()
        self._store = store
        self._prefix = prefix
        self._items: AsyncIterator[ObjectInfo] | None = None
        self._seen: set[str] = set()

    async def fill(self) -> None:
        """Top ``ready`` up to a batch; leave it empty at the end of the listing."""
        if self._items is None:
            self._items = self._store.list(self._prefix)
        items = self._items
        try:
            while len(self.ready) < _BATCH_OBJECTS:
                info = await anext(items, None)
                if info is None:
                    return
                if info.key not in self._seen:
                    self._seen.add(info.key)
                    self.ready.append(info)
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        items, self._items = self._items, None
        if items is not None:
            await close_listing(items)
