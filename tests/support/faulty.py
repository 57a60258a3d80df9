"""A store that fails on purpose, the same way for the same seed."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, TypeAlias, TypeVar, cast

from s3cache.errors import PermanentError, TransientError
from s3cache.store import NotAccepted, Store, WrapperStore

#: ``error`` and ``permanent`` raise :class:`~s3cache.errors.TransientError` and
#: :class:`~s3cache.errors.PermanentError` before the call has any effect.
#: ``hang`` never answers, ``slow`` answers late. ``truncate`` and ``bit_flip`` damage the bytes
#: that are read. ``fail_after_commit`` completes a write, and then raises ``TransientError``.
Fault: TypeAlias = Literal[
    "error", "permanent", "hang", "slow", "truncate", "bit_flip", "fail_after_commit"
]
FaultyVerb: TypeAlias = Literal["get", "get_range", "head", "put", "delete", "list"]

_T = TypeVar("_T")

_ANY: tuple[Fault, ...] = ("error", "permanent", "hang", "slow")
_READ: tuple[Fault, ...] = (*_ANY, "truncate", "bit_flip")
_WRITE: tuple[Fault, ...] = (*_ANY, "fail_after_commit")
_APPLICABLE: Mapping[FaultyVerb, tuple[Fault, ...]] = {
    "get": _READ,
    "get_range": _READ,
    "head": _ANY,
    "put": _WRITE,
    "delete": _WRITE,
    "list": _ANY,
}


class FaultyStore(WrapperStore):
    """A store with random faults, by ``rates`` and ``seed``, and faults that :meth:`inject` orders.

    Injected faults do not change which random fault the n-th call draws with the same seed.

    Args:
        rates: the probability of each fault, per call, at most 1 in total; a verb ignores faults
            that make no sense for it.
        slow_s: the delay of a slow call.

    Attributes:
        counts: the number of faults, by verb and fault.
    """

    def __init__(
        self,
        inner: Store,
        rates: Mapping[Fault, float] | None = None,
        *,
        seed: int = 0,
        slow_s: float = 0.01,
    ) -> None:
        super().__init__(inner)
        self.rates = rates or {}
        self.counts: Counter[tuple[FaultyVerb, Fault]] = Counter()
        self._random = random.Random(seed)
        self._slow_s = slow_s
        self._ordered: dict[FaultyVerb, deque[Fault]] = {verb: deque() for verb in _APPLICABLE}

    def inject(self, verb: FaultyVerb, fault: Fault, *, times: int = 1) -> None:
        """Inject ``fault`` into the next ``times`` calls of ``verb``, after earlier injections."""
        assert fault in _APPLICABLE[verb]
        self._ordered[verb].extend([fault] * times)

    def clear(self) -> None:
        """Forget injected faults that have not happened yet."""
        for faults in self._ordered.values():
            faults.clear()

    async def _around(self, op: str, key: str, call: Callable[[], Awaitable[_T]]) -> _T:
        if op not in _APPLICABLE:
            return await call()
        verb = cast("FaultyVerb", op)
        fault, where = self._draw(verb)
        await self._before(verb, key, fault)
        answer: Any = await call()
        if fault == "fail_after_commit":
            self.counts[verb, fault] += 1
            raise TransientError("injected error after the commit", op=op, store=self.url, key=key)
        is_data = answer and not isinstance(answer, NotAccepted)
        if is_data and (fault == "truncate" or fault == "bit_flip"):
            self.counts[verb, fault] += 1
            damaged = bytearray(answer)
            if fault == "truncate":
                del damaged[int(where * len(damaged)) :]
            else:
                bit = int(where * len(damaged) * 8)
                damaged[bit // 8] ^= 1 << bit % 8
            answer = bytes(damaged)
        return cast("_T", answer)

    def _draw(self, verb: FaultyVerb) -> tuple[Fault | None, float]:
        """Return the fault of this call, and a number in [0, 1) for the place in the data."""
        chance, where = self._random.random(), self._random.random()
        if self._ordered[verb]:
            return self._ordered[verb].popleft(), where
        for fault in _APPLICABLE[verb]:
            chance -= self.rates.get(fault, 0.0)
            if chance < 0:
                return fault, where
        return None, where

    async def _before(self, verb: FaultyVerb, key: str, fault: Fault | None) -> None:
        if fault is None or fault not in _ANY:
            return
        self.counts[verb, fault] += 1
        if fault == "error":
            raise TransientError("injected error", op=verb, store=self.url, key=key)
        if fault == "permanent":
            raise PermanentError("injected permanent error", op=verb, store=self.url, key=key)
        if fault == "hang":
            await asyncio.Event().wait()
        await asyncio.sleep(self._slow_s)
