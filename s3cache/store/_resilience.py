"""Calls that may fail: each attempt is counted, repeated within bounds, and in the end not made.

The three wrappers nest in this order::

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
from typing import Literal, TypeAlias, TypeVar, get_args

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    stop_after_attempt,
    stop_before_delay,
    wait_random_exponential,
)

from s3cache import _options
from s3cache._logs import logger_of
from s3cache._options import count, option, seconds
from s3cache._words import counted
from s3cache.errors import (
    CircuitOpenError,
    PreconditionError,
    StoreError,
    TransientError,
)
from s3cache.stats import Meter, Verb, VerbStats
from s3cache.store._base import (
    Buffer,
    NotAdmitted,
    ObjectInfo,
    PutMode,
    Store,
    WrapperStore,
    close_listing,
    listing,
)

__all__ = [
    "BreakerPolicy",
    "BreakerState",
    "BreakingStore",
    "MeteredStore",
    "RetryPolicy",
    "RetryingStore",
]

logger = logger_of("storage")

_T = TypeVar("_T")
BreakerState: TypeAlias = Literal["closed", "open", "half-open"]

# Items of a listing fetched by one retried call: a page of S3.
_BATCH_OBJECTS = 1_000


# -- counting


class MeteredStore(WrapperStore):
    """Measures each call to ``inner``; what it measures depends on where in a stack it stands.

    Inside :class:`RetryingStore` it sees every attempt, outside only the outcome.
    """

    def __init__(self, inner: Store, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(inner)
        self._clock = clock
        self._meters: dict[Verb, Meter] = {verb: Meter() for verb in get_args(Verb)}

    def snapshot(self) -> Mapping[Verb, VerbStats]:
        """Every verb's statistics so far; may be called from any thread."""
        return MappingProxyType({verb: meter.snapshot() for verb, meter in self._meters.items()})

    async def _around(self, verb: Verb, key: str, call: Callable[[], Awaitable[_T]]) -> _T:
        measured = _Call()
        try:
            with self._timed(measured):
                answer = await call()
            if verb in ("get", "get_range"):
                measured.bytes_in = _size(answer)
        finally:
            self._record(verb, measured)
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
        measured = _Call()
        try:
            async with listing(self.inner, prefix) as items:
                while True:
                    with self._timed(measured):
                        info = await anext(items, None)
                    if info is None:
                        return
                    yield info
        finally:
            self._record("list", measured)

    def _record(self, verb: Verb, measured: _Call) -> None:
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
                before_sleep=_tell,
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
        if there is None or isinstance(there, NotAdmitted):
            return False
        return bytes(there) == bytes(data)


def _tell(state: RetryCallState) -> None:
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

    Closed, calls pass, and ``policy.failures`` transient failures in a row open it. Open, no call
    reaches ``inner`` for ``policy.reset_after_s``. Then it is half-open: exactly one call passes
    as a probe; an answer closes the breaker, a transient failure opens it for as long again.

    Every answer counts as success, be it "denied", "exists already" or "not there". A cancelled
    call says nothing about the server. Each step of a listing is a call.
    """

    def __init__(
        self, inner: Store, policy: BreakerPolicy, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(inner)
        self.policy = policy
        self._clock = clock
        self._failures = 0
        self._open_until: float | None = None
        self._probing = False

    @property
    def state(self) -> BreakerState:
        if self._open_until is None:
            return "closed"
        if self._probing or self._clock() >= self._open_until:
            return "half-open"
        return "open"

    def give_up(self) -> None:
        """Somebody has waited for an answer as long as they may: count it as a failure.

        The call that they waited for goes on, and counts once more when it ends.
        """
        self._count_failure(is_probe=False)

    async def _around(self, verb: Verb, key: str, call: Callable[[], Awaitable[_T]]) -> _T:
        is_probe = self._admit(verb, key)
        try:
            answer = await call()
        except TransientError:
            self._count_failure(is_probe)
            raise
        except StoreError:
            self._count_answer(is_probe)
            raise
        else:
            self._count_answer(is_probe)
            return answer
        finally:
            # Also where the call was cancelled: the next one is the probe then.
            if is_probe:
                self._probing = False

    def _admit(self, verb: Verb, key: str) -> bool:
        """Whether the call about to be made is the probe; raises where it must not be made."""
        if self._open_until is None:
            return False
        left_s = self._open_until - self._clock()
        if self._probing or left_s > 0:
            when = "a probe is under way" if self._probing else f"next probe in {left_s:.1f} s"
            raise CircuitOpenError(
                f"circuit open after {counted(self._failures, 'failure')} in a row, {when}",
                op=verb,
                store=self.url,
                key=key,
            )
        self._probing = True
        return True

    # A call that was under way when the breaker opened tells of the past: while it is open only
    # the probe counts.

    def _count_answer(self, is_probe: bool) -> None:
        if is_probe or self._open_until is None:
            self._failures = 0
            self._open_until = None

    def _count_failure(self, is_probe: bool) -> None:
        if not is_probe and self._open_until is not None:
            return
        self._failures += 1
        if is_probe or self._failures >= self.policy.failures:
            self._open_until = self._clock() + self.policy.reset_after_s
