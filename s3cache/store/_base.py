"""The store protocol, a store in memory, and the wrappers that add retries, metrics or a breaker.

Each keeps the promises of :class:`Store`, and passes the same contract suite. A breaker belongs
outside the retries: attempts inside them are cut off by cancellation, which would not count as a
failure, but a server that hangs must open the breaker too.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, get_args, overload, runtime_checkable

from s3cache.errors import (
    AccessDeniedError,
    CircuitOpenError,
    ConfigError,
    CredentialsError,
    MissingContainerError,
    NoSpaceError,
    PermanentError,
    PreconditionError,
    ReadOnlyError,
    StoreError,
    TransientError,
)
from s3cache.stats import Counters, Verb, VerbStats
from s3cache.util.logs import logger_of
from s3cache.util.threads import Breaker

logger = logger_of("storage")

Buffer: TypeAlias = "bytes | bytearray | memoryview"
PutMode: TypeAlias = Literal["overwrite", "create"]
#: Decides by the size of an object, in bytes, whether to read its body.
AcceptSize: TypeAlias = Callable[[int], bool]

_T = TypeVar("_T")

# S3 allows 1,024 bytes for prefix and key together:
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/object-keys.html
MAX_PATH_BYTES = 1024
MAX_KEY_BYTES = 900
# No entry has a longer name: v1/<digit>/<128 of a key>.<64 of a variant>
LONGEST_NAME_BYTES = 198

# Each segment is a file name that no file system confuses with another name.
_SEGMENT = "[a-z0-9_=-][a-z0-9_.=-]{0,199}"
_KEY = re.compile(f"{_SEGMENT}(/{_SEGMENT})*")


def check_key(key: str) -> str:
    """Return ``key`` if every store can hold it; else raise ConfigError.

    It is a path of segments of 1 to 200 of ``a-z 0-9 _ . = -`` that do not begin with a dot.
    """
    if not is_key(key):
        raise ConfigError(
            f"key {key[:80]!r}",
            "is too long, or does not consist of segments of a-z 0-9 _ . = - separated by '/'",
            "use a relative path such as 'ab/cdef.0'",
        )
    return key


def is_key(key: str) -> bool:
    """Return whether ``key`` can name an object, see :func:`check_key`."""
    return len(key) <= MAX_KEY_BYTES and _KEY.fullmatch(key) is not None


_OS_ERRORS: Mapping[type[StoreError], str] = {
    NoSpaceError: "ENOSPC EDQUOT EFBIG",
    ReadOnlyError: "EROFS",
    AccessDeniedError: "EACCES EPERM",
    MissingContainerError: "ENOENT ENOTDIR",
    TransientError: "EIO EAGAIN EBUSY EMFILE ENFILE ENOLCK ESTALE ETIMEDOUT",
}


@contextlib.contextmanager
def os_errors(op: str, where: str, key: str = "") -> Iterator[None]:
    """Convert an ``OSError`` in the block to the :class:`StoreError` for its ``errno``."""
    try:
        yield
    except OSError as exc:
        name = errno.errorcode.get(exc.errno or 0)
        kinds = (kind for kind, names in _OS_ERRORS.items() if name in names.split())
        message = exc.strerror or str(exc)
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            message += ", of bytes or of inodes: see 'df -h' and 'df -i'"
        if exc.filename:
            message += f" ({exc.filename!r})"
        raise next(kinds, PermanentError)(message, op=op, store=where, key=key) from exc


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    key: str
    size: int  # bytes
    modified: float  # seconds since the epoch, by the store's clock


@dataclass(frozen=True, slots=True)
class NotAccepted:
    """The answer of ``get`` for an object that exists, but with a ``size`` that was refused."""

    size: int


@runtime_checkable
class Store(Protocol):
    """Bytes under keys, for any number of concurrent tasks of one event loop.

    Every method raises :class:`~s3cache.errors.TransientError` or
    :class:`~s3cache.errors.PermanentError` (or a subclass) if the store fails, and
    :class:`~s3cache.errors.ConfigError` for an illegal key, see :func:`check_key`.
    """

    @property
    def url(self) -> str:
        """The location of this store for messages, without credentials."""
        ...

    @property
    def via(self) -> str:
        """The proxy that requests go through, as words for messages; empty without one."""
        return ""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    # An implementation needs no overloads if it is annotated to return Any.
    @overload
    async def get(self, key: str) -> Buffer | None: ...
    @overload
    async def get(
        self, key: str, accept_size: AcceptSize | None
    ) -> Buffer | NotAccepted | None: ...
    async def get(
        self, key: str, accept_size: AcceptSize | None = None
    ) -> Buffer | NotAccepted | None:
        """Return the whole object, or None if there is none.

        It is one version of the object as written by one ``put``, never a mixture or a fragment.

        ``accept_size`` is called with the object's size, on the event loop, before memory for the
        body is allocated; if it returns False, the answer is :class:`NotAccepted`. It is called
        again if the object is read again, after a failure or because another version replaced it.
        """
        ...

    async def get_range(self, key: str, length: int) -> Buffer | None:
        """Return the first ``length`` bytes (1 or more), fewer of a smaller object, or None."""
        ...

    async def head(self, key: str) -> ObjectInfo | None:
        """Return the object's size and time, or None if there is none."""
        ...

    async def put(
        self,
        key: str,
        data: Buffer,
        *,
        mode: PutMode = "overwrite",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Write the whole object or fail: no reader ever sees a fragment.

        With ``mode="create"`` an existing object stays and
        :class:`~s3cache.errors.PreconditionError` is raised. If the store has
        :attr:`atomic_create`, exactly one of several concurrent creators succeeds.
        A failed ``put`` may still have been committed (if the answer was lost).

        ``metadata`` (ASCII names and values, 2 KiB in all) describes the object to people who look
        at the bucket. Stores without support drop it; it is never read back.
        """
        ...

    async def delete(self, key: str) -> None:
        """Remove the object; no error if there is none."""
        ...

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        """Yield all objects with keys that begin with ``prefix`` (any string), in any order.

        Objects that are written or deleted meanwhile may be missing. Illegal keys are not listed.
        """
        after = None
        while True:
            infos, after = await self.list_page(prefix, after)
            for info in infos:
                yield info
            if after is None:
                return

    async def list_page(
        self, prefix: str, after: str | None = None
    ) -> tuple[Sequence[ObjectInfo], str | None]:
        """Return the page of :meth:`list` for the token ``after``, and the next token, or None."""
        ...

    async def atomic_create(self) -> bool | None:
        """Return whether exactly one of several concurrent ``put(mode="create")`` succeeds.

        None means that no create has shown it yet.
        """
        return True

    async def connect(self) -> None:
        """Connect before the first call needs it; do nothing if there is nothing to open."""
        return

    def forget_failures(self) -> None:
        """Let the next call try what failed before, without a pause: loading credentials."""
        return

    async def aclose(self) -> None:
        """Release connections and files. A second call does nothing."""
        return


class MemoryStore(Store):
    """A store in this process's memory, for tests; it keeps its objects after a close."""

    def __init__(self, name: str = "") -> None:
        self._url = f"memory://{name}"
        self._objects: dict[str, tuple[bytes, float]] = {}

    @property
    def url(self) -> str:
        return self._url

    async def get(self, key: str, accept_size: AcceptSize | None = None) -> Any:
        data, _ = self._objects.get(check_key(key), (None, 0.0))
        is_wanted = data is None or accept_size is None or accept_size(len(data))
        return data if is_wanted else NotAccepted(len(data or b""))

    async def get_range(self, key: str, length: int) -> Buffer | None:
        data = await self.get(key)
        return None if data is None else data[:length]

    async def head(self, key: str) -> ObjectInfo | None:
        data, modified = self._objects.get(check_key(key), (None, 0.0))
        return None if data is None else ObjectInfo(key, len(data), modified)

    async def put(self, key: str, data: Buffer, *, mode: PutMode = "overwrite", **_: Any) -> None:
        if check_key(key) in self._objects and mode == "create":
            raise PreconditionError("exists already", op="put", store=self._url, key=key)
        self._objects[key] = (bytes(data), time.time())

    async def delete(self, key: str) -> None:
        self._objects.pop(check_key(key), None)

    async def list_page(
        self, prefix: str, after: str | None = None
    ) -> tuple[Sequence[ObjectInfo], str | None]:
        objects = self._objects.items()
        infos = [ObjectInfo(key, len(data), modified) for key, (data, modified) in objects]
        return [info for info in infos if info.key.startswith(prefix)], None


def _method(verb: Verb, name: str = "") -> Any:
    """Return the method of a wrapper that calls the same method of its inner store."""

    async def method(self: WrapperStore, key: str, *args: Any, **options: Any) -> Any:
        call = getattr(self.inner, name or verb)
        return await self._around(verb, key, lambda: call(key, *args, **options))

    return method


class WrapperStore(Store):
    """Passes every call on to ``inner``, also the close.

    A subclass overrides :meth:`_around` to change all calls, or the method of a verb.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    async def _around(self, verb: Verb, key: str, call: Callable[[], Awaitable[_T]]) -> _T:
        """Make one call to ``inner`` by awaiting ``call()``, as often as necessary.

        A page of a listing is a call, and ``key`` its prefix; for the whole store it is ``""``.
        """
        return await call()

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def via(self) -> str:
        return self.inner.via

    get = _method("get")
    get_range = _method("get_range")
    head = _method("head")
    put = _method("put")
    delete = _method("delete")
    list_page = _method("list", "list_page")

    async def atomic_create(self) -> bool | None:
        return await self._around("atomic_create", "", self.inner.atomic_create)

    async def connect(self) -> None:
        await self.inner.connect()

    def forget_failures(self) -> None:
        self.inner.forget_failures()

    async def aclose(self) -> None:
        await self.inner.aclose()


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Limits on attempts and time."""

    attempts: int  # in all, including the first one
    total_timeout_s: float  # from the first attempt; the running attempt is cut off
    attempt_timeout_s: float  # of one attempt, which is then cut off
    # The pause before attempt n + 1 is drawn from [0, base_delay_s * 2**(n-1)], so that clients
    # that failed together do not come back together:
    # https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/
    base_delay_s: float = 0.1
    max_delay_s: float = 10.0  # the longest pause


class RetryingStore(WrapperStore):
    """Repeats calls that raise :class:`~s3cache.errors.TransientError`, according to ``policy``.

    The final error is that of the last attempt, with ``attempts`` and ``elapsed_s`` filled in. An
    attempt that takes too long is cancelled and counts as a ``TransientError``. The
    ``CircuitOpenError`` of a breaker is not retried.

    If the answer to ``put(mode="create")`` is lost, the next attempt finds its own object. So
    after a failed attempt an object with the same bytes counts as written; one with other bytes
    raises :class:`~s3cache.errors.PreconditionError`. Two writers of the same bytes may both
    succeed.

    ``policy`` bounds each page of a listing, not the whole.
    """

    def __init__(self, inner: Store, policy: RetryPolicy) -> None:
        import tenacity as t

        super().__init__(inner)
        self.policy = policy
        self._retrying = t.AsyncRetrying(
            retry=t.retry_if_exception_type(TransientError)
            & t.retry_if_not_exception_type(CircuitOpenError),
            stop=t.stop_after_attempt(policy.attempts)
            | t.stop_before_delay(policy.total_timeout_s),
            wait=t.wait_random_exponential(policy.base_delay_s, policy.max_delay_s),
            before_sleep=lambda state: logger.info(
                "%s; it is tried again", state.outcome and state.outcome.exception()
            ),
            reraise=True,
        )

    async def _around(self, verb: Verb, key: str, call: Callable[[], Awaitable[_T]]) -> _T:
        policy, started, attempts = self.policy, time.monotonic(), 0

        async def attempt() -> _T:
            nonlocal attempts
            attempts += 1
            left_s = started + policy.total_timeout_s - time.monotonic()
            timeout_s = max(min(policy.attempt_timeout_s, left_s), 0.0)
            try:
                if sys.version_info >= (3, 11):
                    async with asyncio.timeout(timeout_s):  # unlike wait_for, it makes no task
                        return await call()
                return await asyncio.wait_for(call(), timeout_s)
            except asyncio.TimeoutError:
                problem = f"no answer within {timeout_s:.3g} s{self.via}"
                raise TransientError(problem, op=verb, store=self.url, key=key) from None

        try:
            return await self._retrying.copy()(attempt)
        except StoreError as error:
            error.attempts, error.elapsed_s = attempts, time.monotonic() - started
            raise

    async def put(self, key: str, data: Buffer, **options: Any) -> None:
        tried_before = False

        async def attempt() -> None:
            nonlocal tried_before
            ambiguous, tried_before = tried_before, True
            try:
                await self.inner.put(key, data, **options)
            except PreconditionError:
                size = memoryview(data).nbytes
                if not ambiguous or bytes(data) != await self.inner.get(key, lambda n: n == size):
                    raise

        await self._around("put", key, attempt)


class BreakingStore(WrapperStore):
    """Fails at once with ``CircuitOpenError`` while ``breaker`` is open.

    Failures without an answer count, and so does a lack of credentials. Every answer is a success,
    also "denied" and "absent". The ``CircuitOpenError`` has the reason of the last such failure.
    """

    def __init__(self, inner: Store, breaker: Breaker) -> None:
        super().__init__(inner)
        self.breaker = breaker
        self._reason = CircuitOpenError.reason

    async def _around(self, verb: Verb, key: str, call: Callable[[], Awaitable[_T]]) -> _T:
        try:
            is_probe = self.breaker.enter()
        except CircuitOpenError as error:
            error.op, error.store, error.key = verb, self.url, key
            error.reason = self._reason
            raise
        try:
            answer = await call()
        except (TransientError, CredentialsError) as error:
            self._reason = error.reason
            self.breaker.fail(is_probe)
            raise
        except StoreError:
            self.breaker.succeed(is_probe)
            raise
        except BaseException:
            self.breaker.leave(is_probe)
            raise
        self.breaker.succeed(is_probe)
        return answer


class MeteredStore(WrapperStore):
    """Measures each call to ``inner``: inside :class:`RetryingStore` every attempt."""

    def __init__(self, inner: Store, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(inner)
        self._clock = clock
        self._meters: dict[Verb, Counters] = {verb: Counters() for verb in get_args(Verb)}

    def snapshot(self) -> Mapping[Verb, VerbStats]:
        """Return every verb's statistics so far; may be called from any thread."""
        return {verb: meter.read(VerbStats) for verb, meter in self._meters.items()}

    async def _around(self, verb: Verb, key: str, call: Callable[[], Awaitable[_T]]) -> _T:
        meter, started, bytes_in = self._meters[verb], self._clock(), 0
        try:
            answer = await call()
            if isinstance(answer, bytes | bytearray | memoryview):
                bytes_in = memoryview(answer).nbytes
            return answer
        except BaseException as error:
            meter.add(type(error).__name__, errors=1)
            raise
        finally:
            meter.add(calls=1, bytes_in=bytes_in, latency=self._clock() - started)

    async def put(self, key: str, data: Buffer, **options: Any) -> None:
        await super().put(key, data, **options)
        self._meters["put"].add(bytes_out=memoryview(data).nbytes)
