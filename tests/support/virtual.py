"""An event loop with a clock that jumps to the next timer: hours pass in a moment."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from s3cache.tier import cancel_all

_T = TypeVar("_T")


class _Selector(selectors.SelectSelector):
    """A selector that advances the clock by the time that the loop would wait."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("all tasks wait for events that never come")
        self.now_s += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._clock.now_s


def run_virtually(work: Coroutine[Any, Any, _T]) -> _T:
    """Return the result of a coroutine that waits only for time and other tasks."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.run_until_complete(cancel_all(asyncio.all_tasks(loop)))
        loop.close()
