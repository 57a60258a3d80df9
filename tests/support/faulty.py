"""A store that fails on purpose, the same way for the same seed."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, TypeAlias

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

_ANY: tuple[Fault, ...] = ("error", "permanent", "hang", "slow")
_APPLICABLE: Mapping[str, tuple[Fault, ...]] = {
    "get": (*_ANY, "truncate", "bit_flip"),
    "get_range": (*_ANY, "truncate", "bit_flip"),
    "head": _ANY,
    "put": (*_ANY, "fail_after_commit"),
    "delete": (*_ANY, "fail_after_commit"),
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
        self.counts: Counter[tuple[str, Fault]] = Counter()
        self._random = random.Random(seed)
        self._slow_s = slow_s
        self._ordered: dict[str, deque[Fault]] = {verb: deque() for verb in _APPLICABLE}

    def inject(self, verb: FaultyVerb, fault: Fault, *, times: int = 1) -> None:
        """Inject ``fault`` into the next ``times`` calls of ``verb``, after earlier injections."""
        assert fault in _APPLICABLE[verb]
        self._ordered[verb].extend([fault] * times)

    def clear(self) -> None:
        """Forget injected faults that have not happened yet."""
        for faults in self._ordered.values():
            faults.clear()

    async def _around(self, verb: str, key: str, call: Callable[[], Awaitable[Any]]) -> Any:
        if verb not in _APPLICABLE:
            return await call()
        chance, where = self._random.random(), self._random.random()
        fault = self._ordered[verb].popleft() if self._ordered[verb] else self._draw(verb, chance)
        at: dict[str, Any] = {"op": verb, "store": self.url, "key": key}
        if fault in _ANY:
            self.counts[verb, fault] += 1
        if fault == "error":
            raise TransientError("injected error", **at)
        if fault == "permanent":
            raise PermanentError("injected permanent error", **at)
        if fault == "hang":
            await asyncio.Event().wait()
        if fault == "slow":
            await asyncio.sleep(self._slow_s)
        answer = await call()
        if fault == "fail_after_commit":
            self.counts[verb, fault] += 1
            raise TransientError("injected error after the commit", **at)
        if fault in ("truncate", "bit_flip") and answer and not isinstance(answer, NotAccepted):
            self.counts[verb, fault] += 1
            answer, bit = bytearray(answer), int(where * len(answer) * 8)
            if fault == "truncate":
                del answer[bit // 8 :]
            else:
                answer[bit // 8] ^= 1 << bit % 8
            return bytes(answer)
        return answer

    def _draw(self, verb: str, chance: float) -> Fault | None:
        for fault in _APPLICABLE[verb]:
            chance -= self.rates.get(fault, 0.0)
            if chance < 0:
                return fault
        return None
