"""A bound on the memory that several transfers take together."""

from __future__ import annotations

import asyncio
from collections import deque

__all__ = ["Budget"]


class Budget:
    """Bytes that may be held at once. Used on one event loop only.

    Whoever is alone gets what it wants, even if that is more than there is: otherwise it would
    never be had.

    Args:
        max_bytes: all that there is.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self, size: int) -> None:
        """Hold ``size`` bytes, as soon as they are to be had."""
        while not self.grow(0, size):
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            await waiter

    def grow(self, held: int, size: int) -> bool:
        """Hold ``size`` bytes instead of ``held``, if they are to be had now."""
        others = self._held - held
        if others and others + size > self._max_bytes:
            return False
        self._held = others + size
        return True

    def give(self, size: int) -> None:
        """Hold ``size`` bytes no more."""
        self._held -= size
        waiting, self._waiting = self._waiting, deque()
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)
