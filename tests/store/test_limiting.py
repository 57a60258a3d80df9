"""The limit on concurrent calls: kept by every verb, never a deadlock."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from s3cache.errors import ConfigError, TransientError
from s3cache.store import LimitingStore, MemoryStore, ObjectInfo, WrapperStore
from s3cache.store._base import close_listing
from s3cache.testing import FaultyStore
from s3cache.testing.contract import VERBS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Crowd(WrapperStore):
    """Measures how many calls run at once, and holds each for a few turns of the loop."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.now = 0
        self.most = 0

    async def _stay(self) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        for _ in range(3):
            await asyncio.sleep(0)
        self.now -= 1

    async def get(self, key: str, admit: object = None) -> None:
        await self._stay()

    async def get_range(self, key: str, start: int, length: int) -> None:
        await self._stay()

    async def head(self, key: str) -> None:
        await self._stay()

    async def put(self, key: str, *args: object, **kwargs: object) -> None:
        await self._stay()

    async def delete(self, key: str) -> None:
        await self._stay()

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        for i in range(3):
            await self._stay()
            yield ObjectInfo(str(i), 0, 0.0)


async def read_listing(store: LimitingStore) -> None:
    async for _ in store.list():
        await asyncio.sleep(0)


@pytest.mark.parametrize("limit", [1, 3, 8])
async def test_no_more_than_the_limit_run_at_once(limit: int) -> None:
    """Over all verbs together; and as many as that do."""
    crowd = Crowd()
    store = LimitingStore(crowd, limit)
    calls = [verb(store, "key") for verb in VERBS.values() for _ in range(4)]
    await asyncio.gather(*calls, *(read_listing(store) for _ in range(3)))
    assert crowd.most == limit
    assert crowd.now == 0


async def test_a_consumer_may_call_inside_a_listing_with_a_limit_of_one() -> None:
    store = LimitingStore(MemoryStore(), 1)
    for key in ("a", "b", "c"):
        await store.put(key, b"x")
    read = [info.key async for info in store.list() if await store.get(info.key) == b"x"]
    nested = [(a.key, b.key) async for a in store.list() async for b in store.list()]
    assert sorted(read) == ["a", "b", "c"]
    assert len(nested) == 9


async def test_failed_and_cancelled_calls_give_their_slot_back() -> None:
    faulty = FaultyStore(MemoryStore())
    store = LimitingStore(faulty, 1)
    faulty.inject("get", "error")
    with pytest.raises(TransientError):
        await store.get("key")
    faulty.inject("get", "hang")
    running = asyncio.ensure_future(store.get("key"))
    waiting = asyncio.ensure_future(store.get("key"))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, waiting, return_exceptions=True)
    assert await asyncio.wait_for(store.get("key"), 20) is None


async def test_a_listing_that_is_left_holds_no_slot() -> None:
    store = LimitingStore(MemoryStore(), 1)
    await store.put("a", b"")
    listing = store.list()
    await anext(listing)
    assert await asyncio.wait_for(store.get("a"), 20) == b""
    await close_listing(listing)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_is_refused(limit: int) -> None:
    with pytest.raises(ConfigError, match="max_concurrent"):
        LimitingStore(MemoryStore(), limit)
