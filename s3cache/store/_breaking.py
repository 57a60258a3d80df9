"""A circuit breaker: stop asking a server that does not answer."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

from s3cache.errors import CircuitOpenError, ConfigError, StoreError, TransientError
from s3cache.store._base import Buffer, ObjectInfo, PutMode, Store
from s3cache.store._wrapper import WrapperStore, listing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

__all__ = ["BreakerPolicy", "BreakerState", "BreakingStore"]

_T = TypeVar("_T")
BreakerState: TypeAlias = Literal["closed", "open", "half-open"]


@dataclass(frozen=True, slots=True)
class BreakerPolicy:
    """When to stop asking, and for how long.

    Attributes:
        failures: this many transient failures in a row open the breaker.
        reset_after_s: seconds it stays open before one call is let through to probe.

    Raises:
        ConfigError: ``failures`` is less than 1 or ``reset_after_s`` negative.
    """

    failures: int
    reset_after_s: float

    def __post_init__(self) -> None:
        if self.failures < 1:
            raise ConfigError(f"failures={self.failures}", "is less than 1", "give 1 or more")
        if not self.reset_after_s >= 0:
            raise ConfigError(f"reset_after_s={self.reset_after_s}", "is negative", "give seconds")


class BreakingStore(WrapperStore):
    """Fails at once with :class:`~s3cache.errors.CircuitOpenError` while the server is down.

    Closed, calls pass, and ``policy.failures`` transient failures in a row open it. Open, no call
    reaches ``inner`` for ``policy.reset_after_s``. Then it is half-open: exactly one call passes
    as a probe; an answer closes the breaker, a transient failure opens it for as long again.

    Every answer counts as success, be it "denied", "exists already" or "not there". A cancelled
    call says nothing about the server, so the breaker belongs outside of whatever turns a hang
    into an error (:class:`~s3cache.store.RetryingStore`). Each step of a listing is a call.
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

    async def get(self, key: str) -> Buffer | None:
        return await self._guard("get", key, lambda: self.inner.get(key))

    async def get_range(self, key: str, start: int, length: int) -> Buffer | None:
        return await self._guard("get_range", key, lambda: self.inner.get_range(key, start, length))

    async def head(self, key: str) -> ObjectInfo | None:
        return await self._guard("head", key, lambda: self.inner.head(key))

    async def put(
        self,
        key: str,
        data: Buffer,
        *,
        mode: PutMode = "overwrite",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        await self._guard(
            "put", key, lambda: self.inner.put(key, data, mode=mode, metadata=metadata)
        )

    async def delete(self, key: str) -> None:
        await self._guard("delete", key, lambda: self.inner.delete(key))

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        async with listing(self.inner, prefix) as items:
            while True:
                info = await self._guard("list", prefix, lambda: anext(items, None))
                if info is None:
                    return
                yield info

    async def atomic_create(self) -> bool:
        return await self._guard("atomic_create", "", self.inner.atomic_create)

    async def _guard(self, op: str, key: str, call: Callable[[], Awaitable[_T]]) -> _T:
        probe = self._admit(op, key)
        try:
            result = await call()
        except TransientError:
            self._failed(probe)
            raise
        except StoreError:
            self._answered(probe)
            raise
        else:
            self._answered(probe)
            return result
        finally:
            # Also where the call was cancelled: the next one is the probe then.
            if probe:
                self._probing = False

    def _admit(self, op: str, key: str) -> bool:
        """Whether the call about to be made is the probe; raises where it must not be made."""
        if self._open_until is None:
            return False
        left_s = self._open_until - self._clock()
        if self._probing or left_s > 0:
            when = "a probe is under way" if self._probing else f"next probe in {left_s:.1f} s"
            raise CircuitOpenError(
                f"circuit open after {self._failures} failures in a row, {when}",
                op=op,
                store=self.url,
                key=key,
            )
        self._probing = True
        return True

    # A call that was under way when the breaker opened tells of the past: while it is open only
    # the probe counts.

    def _answered(self, probe: bool) -> None:
        if probe or self._open_until is None:
            self._failures = 0
            self._open_until = None

    def _failed(self, probe: bool) -> None:
        if not probe and self._open_until is not None:
            return
        self._failures += 1
        if probe or self._failures >= self.policy.failures:
            self._open_until = self._clock() + self.policy.reset_after_s
