"""Wrappers: calls that may fail are repeated, not made while the server is down, and counted.

The wrappers nest in this order::

    BreakingStore(RetryingStore(MeteredStore(store), retry_policy), breaker_policy)

The breaker belongs outside the retries: what reaches a store inside them is cut off by
cancellation, which says nothing about the server, and a server that hangs must open it too.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar, get_args

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    stop_after_attempt,
    stop_before_delay,
    wait_random_exponential,
)

from s3cache.errors import CircuitOpenError, PreconditionError, StoreError, TransientError
from s3cache.stats import Meter, Verb, VerbStats
from s3cache.store._base import (
    Buffer,
    NotAccepted,
    ObjectInfo,
    PutMode,
    Store,
    WrapperStore,
    close_listing,
    listing,
)
from s3cache.util import options as _options
from s3cache.util.breaker import Breaker, BreakerState
from s3cache.util.logs import logger_of
from s3cache.util.options import count, option, seconds

__all__ = [
    "BreakerPolicy",
    "BreakerState",
    "BreakingStore",
    "LatencyStore",
    "MeteredStore",
    "RetryPolicy",
    "RetryingStore",
]

logger = logger_of("storage")

_T = TypeVar("_T")

# Items of a listing fetched by one retried call: a page of S3.
_BATCH_OBJECTS = 1_000


# -- trying again


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

    attempts: int = option(kind=count())
    total_timeout_s: float = option(kind=seconds(0.001))
    attempt_timeout_s: float = option(kind=seconds(0.001))
    base_delay_s: float = option(kind=seconds())
    max_delay_s: float = option(kind=seconds())

    def __post_init__(self) -> None:
        _options.check(self)


class RetryingStore(WrapperStore):
    """Repeats calls that raise :class:`~s3cache.errors.TransientError`, as ``policy`` says.

    The error that ends it is the last attempt's own, with ``attempts`` and ``elapsed_s`` filled
    in. An attempt that takes too long is cancelled and counts as a ``TransientError``.

    ``CircuitOpenError`` is not retried: a breaker raises it to spare the caller the wait, and it
    stays open for longer than any sensible pause.

    ``put(mode="create")`` whose answer was lost finds its own object when it tries again. After a
    failed attempt, then, an object that is there with the same bytes counts as written; one with
    other bytes raises :class:`~s3cache.errors.PreconditionError`. Two writers of the same bytes
    may so both succeed.

    ``list`` yields each object once, whatever fails: it begins again and passes over the keys it
    has seen, which it remembers. ``policy`` bounds each batch of 1,000 objects, not the whole
    listing, and the consumer's own time does not count.
    """

    def __init__(self, inner: Store, policy: RetryPolicy) -> None:
        super().__init__(inner)
        self.policy = policy
        self._knows_atomic = False

    async def _around(self, verb: Verb, key: str, call: Callable[[], Awaitable[_T]]) -> _T:
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
                    f"no answer within {max(timeout_s, 0.0):.3g} s",
                    op=verb,
                    store=self.url,
                    key=key,
                ) from None

        try:
            # An object for each call: it keeps the state of its current iteration in a
            # threading.local, which tasks on one loop would share.
            return await AsyncRetrying(
                retry=retry_if_exception(_is_worth_retrying),
                stop=stop_after_attempt(policy.attempts)
                | stop_before_delay(policy.total_timeout_s),
                wait=wait_random_exponential(
                    multiplier=policy.base_delay_s, max=policy.max_delay_s
                ),
                before_sleep=_log_retry,
                reraise=True,
            )(attempt)
        except StoreError as error:
            error.attempts = attempts
            error.elapsed_s = time.monotonic() - started
            raise

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

        await self._around("put", key, attempt)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        batches = _Batches(self.inner, prefix)
        try:
            while True:
                await self._around("list", prefix, batches.fill)
                if not batches.ready:
                    return
                while batches.ready:
                    yield batches.ready.popleft()
        finally:
            await batches.aclose()

    async def atomic_create(self) -> bool:
        if self._knows_atomic:  # from memory then, and before every upload
            return await self.inner.atomic_create()
        answer = await super().atomic_create()
        self._knows_atomic = True
        return answer

    async def _holds(self, key: str, data: Buffer) -> bool:
        size = memoryview(data).nbytes
        there = await self.inner.get(key, lambda their_size: their_size == size)
        if there is None or isinstance(there, NotAccepted):
            return False
        return bytes(there) == bytes(data)


def _log_retry(state: RetryCallState) -> None:
    error = None if state.outcome is None else state.outcome.exception()
    logger.info("%s; it is tried again", error)


def _is_worth_retrying(error: BaseException) -> bool:
    return isinstance(error, TransientError) and not isinstance(error, CircuitOpenError)


if sys.version_info >= (3, 11):

    async def _within(timeout_s: float, work: Awaitable[_T]) -> _T:
        # Unlike wait_for, it makes no task.
        async with asyncio.timeout(timeout_s):
            return await work

else:

    async def _within(timeout_s: float, work: Awaitable[_T]) -> _T:
        return await asyncio.wait_for(work, timeout_s)


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


# -- not trying at all


@dataclass(frozen=True, slots=True)
class BreakerPolicy:
    """When to stop asking, and for how long.

    Attributes:
        failures: this many transient failures in a row open the breaker.
        reset_after_s: seconds it stays open before one call is let through to probe.

    Raises:
        ConfigError: ``failures`` is less than 1 or ``reset_after_s`` negative.
    """

    failures: int = option(kind=count())
    reset_after_s: float = option(kind=seconds())

    def __post_init__(self) -> None:
        _options.check(self)


class BreakingStore(WrapperStore):
    """Fails at once with :class:`~s3cache.errors.CircuitOpenError` while the server is down.

    See :class:`~s3cache.util.breaker.Breaker`. Transient failures count; every answer is a success,
    be it "denied", "exists already" or "not there". A cancelled call says nothing about the server.
    Each step of a listing is a call.
    """

    def __init__(
        self, inner: Store, policy: BreakerPolicy, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(inner)
        self.policy = policy
        self._breaker = Breaker(policy.failures, policy.reset_after_s, clock=clock)

    @property
    def state(self) -> BreakerState:
        return self._breaker.state

    def give_up(self) -> None:
        """Count a failure for a caller that has waited for an answer as long as it may.

        The call that it waited for goes on, and counts once more when it ends.
        """
        self._breaker.fail()

    async def _around(self, verb: Verb, key: str, call: Callable[[], Awaitable[_T]]) -> _T:
        try:
            is_probe = self._breaker.enter()
        except CircuitOpenError as error:
            error.op, error.store, error.key = verb, self.url, key
            raise
        try:
            answer = await call()
        except TransientError:
            self._breaker.fail(is_probe)
            raise
        except StoreError:
            self._breaker.succeed(is_probe)
            raise
        except BaseException:
            self._breaker.leave(is_probe)
            raise
        self._breaker.succeed(is_probe)
        return answer


# -- metering


# What S3 returns for one ListObjectsV2 request.
_PAGE_OBJECTS = 1_000


class MeteredStore(WrapperStore):
    """Measures each call to ``inner``; what it measures depends on where in a stack it stands.

    Inside :class:`RetryingStore` it sees every attempt, outside only the outcome.
    """

    def __init__(self, inner: Store, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(inner)
        self._clock = clock
        self._meters: dict[Verb, Meter] = {verb: Meter() for verb in get_args(Verb)}

    def snapshot(self) -> Mapping[Verb, VerbStats]:
        """Return every verb's statistics so far; may be called from any thread."""
        return MappingProxyType({verb: meter.snapshot() for verb, meter in self._meters.items()})

    async def _around(self, verb: Verb, key: str, call: Callable[[], Awaitable[_T]]) -> _T:
        with self._recorded(verb) as measured:
            with self._timed(measured):
                answer = await call()
            if verb in ("get", "get_range"):
                measured.bytes_in = _size(answer)
        return answer

    async def put(
        self,
        key: str,
        data: Buffer,
        *,
        mode: PutMode = "overwrite",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        await super().put(key, data, mode=mode, metadata=metadata)
        self._meters["put"].add_bytes_out(_size(data))

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        with self._recorded("list") as measured:
            async with listing(self.inner, prefix) as items:
                while True:
                    with self._timed(measured):
                        info = await anext(items, None)
                    if info is None:
                        return
                    yield info

    @contextmanager
    def _recorded(self, verb: Verb) -> Iterator[_Call]:
        measured = _Call()
        try:
            yield measured
        finally:
            self._meters[verb].record(measured.elapsed_s, measured.bytes_in, measured.error)

    @contextmanager
    def _timed(self, measured: _Call) -> Iterator[None]:
        started = self._clock()
        try:
            yield
        except BaseException as error:
            measured.error = type(error).__name__
            raise
        finally:
            measured.elapsed_s += self._clock() - started


@dataclass(slots=True)
class _Call:
    elapsed_s: float = 0.0
    bytes_in: int = 0
    error: str | None = None


def _size(answer: object) -> int:
    return memoryview(answer).nbytes if isinstance(answer, bytes | bytearray | memoryview) else 0


class LatencyStore(WrapperStore):
    """Makes each call take ``latency_s`` longer, and ``1 / bytes_per_s`` more per byte it moves.

    Calls do not share the bandwidth: it is one connection's, as S3 gives it. A listing pays
    ``latency_s`` for every 1,000 objects.
    """

    def __init__(self, inner: Store, latency_s: float, bytes_per_s: float | None = None) -> None:
        super().__init__(inner)
        self._latency_s = latency_s
        self._s_per_byte = 0.0 if bytes_per_s is None else 1.0 / bytes_per_s

    async def _around(self, verb: Verb, key: str, call: Callable[[], Awaitable[_T]]) -> _T:
        await asyncio.sleep(self._latency_s)
        answer = await call()
        await asyncio.sleep(_size(answer) * self._s_per_byte)
        return answer

    async def put(
        self,
        key: str,
        data: Buffer,
        *,
        mode: PutMode = "overwrite",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        await asyncio.sleep(_size(data) * self._s_per_byte)
        await super().put(key, data, mode=mode, metadata=metadata)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        await asyncio.sleep(self._latency_s)
        listed = 0
        async with listing(self.inner, prefix) as items:
            async for info in items:
                if listed and listed % _PAGE_OBJECTS == 0:
                    await asyncio.sleep(self._latency_s)
                listed += 1
                yield info

    async def atomic_create(self) -> bool:  # a store knows it after the first time
        return await self.inner.atomic_create()
