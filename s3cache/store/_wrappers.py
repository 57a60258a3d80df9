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
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar, get_args

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
    PAGE_OBJECTS,
    Buffer,
    NotAccepted,
    ObjectInfo,
    Store,
    WrapperStore,
    close_listing,
)
from s3cache.store._deadline import Breaker, BreakerState
from s3cache.util.logs import logger_of

__all__ = [
    "BreakerPolicy",
    "BreakingStore",
    "MeteredStore",
    "RetryPolicy",
    "RetryingStore",
]

logger = logger_of("storage")

_T = TypeVar("_T")


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
    """

    attempts: int
    total_timeout_s: float
    attempt_timeout_s: float
    base_delay_s: float
    max_delay_s: float


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
    has seen, which it remembers. ``policy`` bounds each page of 1,000 objects, not the whole
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
                problem = f"no answer within {max(timeout_s, 0.0):.3g} s"
                raise TransientError(problem, op=verb, store=self.url, key=key) from None

        # An object for each call: it keeps the state of its current iteration in a
        # threading.local, which tasks on one loop would share.
        retrying = AsyncRetrying(
            retry=retry_if_exception(_is_worth_retrying),
            stop=stop_after_attempt(policy.attempts) | stop_before_delay(policy.total_timeout_s),
            wait=wait_random_exponential(multiplier=policy.base_delay_s, max=policy.max_delay_s),
            before_sleep=_log_retry,
            reraise=True,
        )
        try:
            return await retrying(attempt)
        except StoreError as error:
            error.attempts = attempts
            error.elapsed_s = time.monotonic() - started
            raise

    async def put(self, key: str, data: Buffer, **options: Any) -> None:
        tried_before = False

        async def attempt() -> None:
            nonlocal tried_before
            ambiguous, tried_before = tried_before, True
            try:
                await self.inner.put(key, data, **options)
            except PreconditionError:
                if not (ambiguous and await self._holds(key, data)):
                    raise

        await self._around("put", key, attempt)

    async def _holds(self, key: str, data: Buffer) -> bool:
        size = memoryview(data).nbytes
        there = await self.inner.get(key, lambda their_size: their_size == size)
        if there is None or isinstance(there, NotAccepted):
            return False
        return bytes(there) == bytes(data)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        items: AsyncIterator[ObjectInfo] | None = None
        seen: set[str] = set()
        page: list[ObjectInfo] = []  # of which a failed attempt has fetched a part

        async def fill() -> bool:
            """Fetch what is lacking in the page; return whether that is the end."""
            nonlocal items
            if items is None:
                items = self.inner.list(prefix)
            try:
                while len(page) < PAGE_OBJECTS:
                    if (info := await anext(items, None)) is None:
                        return True
                    if info.key not in seen:
                        seen.add(info.key)
                        page.append(info)
            except BaseException:
                failed, items = items, None
                await close_listing(failed)
                raise
            return False

        try:
            is_last = False
            while not is_last:
                is_last = await self._around("list", prefix, fill)
                for info in page:
                    yield info
                page.clear()
        finally:
            if items is not None:
                await close_listing(items)

    async def atomic_create(self) -> bool:
        if self._knows_atomic:  # from memory then, and before every upload
            return await self.inner.atomic_create()
        answer = await super().atomic_create()
        self._knows_atomic = True
        return answer


def _log_retry(state: RetryCallState) -> None:
    error = None if state.outcome is None else state.outcome.exception()
    logger.info("%s; it is tried again", error)


def _is_worth_retrying(error: BaseException) -> bool:
    return isinstance(error, TransientError) and not isinstance(error, CircuitOpenError)


async def _within(timeout_s: float, work: Awaitable[_T]) -> _T:
    if sys.version_info >= (3, 11):
        async with asyncio.timeout(timeout_s):  # unlike wait_for, it makes no task
            return await work
    return await asyncio.wait_for(work, timeout_s)


@dataclass(frozen=True, slots=True)
class BreakerPolicy:
    """When to stop asking, and for how long.

    Attributes:
        failures: this many transient failures in a row open the breaker.
        reset_after_s: seconds it stays open before one call is let through to probe.
    """

    failures: int
    reset_after_s: float


class BreakingStore(WrapperStore):
    """Fails at once with :class:`~s3cache.errors.CircuitOpenError` while the server is down.

    See :class:`Breaker`. Transient failures count; every answer is a success,
    be it "denied", "exists already" or "not there". A cancelled call says nothing about the server.
    Each page of a listing is a call.
    """

    def __init__(
        self, inner: Store, policy: BreakerPolicy, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(inner)
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


class MeteredStore(WrapperStore):
    """Measures each call to ``inner``; what it measures depends on where in a stack it stands.

    Inside :class:`RetryingStore` it sees every attempt, outside only the outcome. Each page of a
    listing is a call.
    """

    def __init__(self, inner: Store, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(inner)
        self._clock = clock
        self._meters: dict[Verb, Meter] = {verb: Meter() for verb in get_args(Verb)}

    def snapshot(self) -> Mapping[Verb, VerbStats]:
        """Return every verb's statistics so far; may be called from any thread."""
        return MappingProxyType({verb: meter.snapshot() for verb, meter in self._meters.items()})

    async def _around(self, verb: Verb, key: str, call: Callable[[], Awaitable[_T]]) -> _T:
        started, bytes_in, failure = self._clock(), 0, None
        try:
            answer = await call()
            bytes_in = _size(answer)
            return answer
        except BaseException as error:
            failure = type(error).__name__
            raise
        finally:
            self._meters[verb].record(self._clock() - started, bytes_in, failure)

    async def put(self, key: str, data: Buffer, **options: Any) -> None:
        await super().put(key, data, **options)
        self._meters["put"].add_bytes_out(_size(data))


def _size(answer: object) -> int:
    return memoryview(answer).nbytes if isinstance(answer, bytes | bytearray | memoryview) else 0
