"""A bound on how many calls a store has to serve at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from s3cache.errors import ConfigError
from s3cache.stats import Verb
from s3cache.store._base import Store, WrapperStore

__all__ = ["LimitingStore"]

_T = TypeVar("_T")


class LimitingStore(WrapperStore):
    """At most ``max_concurrent`` calls run in ``inner``; others wait their turn, first come first.

    A listing takes part only while it fetches, never while its consumer holds an item: a loop
    that reads each object it lists gets on with a limit of 1.

    Raises:
        ConfigError: ``max_concurrent`` is less than 1.
    """

    def __init__(self, inner: Store, max_concurrent: int) -> None:
        super().__init__(inner)
        if max_concurrent < 1:
            raise ConfigError(
                f"max_concurrent={max_concurrent}", "is less than 1", "give 1 or more"
            )
        self._slots = asyncio.Semaphore(max_concurrent)

    async def _around(self, verb: Verb, key: str, call: Callable[[], Awaitable[_T]]) -> _T:
        async with self._slots:
            return await call()
