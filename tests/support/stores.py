"""Stores that wait, fail, deny, count or race, and helpers to read and write a store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from s3cache import entries
from s3cache.errors import AccessDeniedError
from s3cache.store import Buffer, MemoryStore, PutMode, Store, WrapperStore
from tests.support.caching import KEY


class GatedStore(WrapperStore):
    """A store that notes each read, write and listing, and lets it wait until the gate is open."""

    def __init__(self, inner: Store, *, is_open: bool = True) -> None:
        super().__init__(inner)
        self.is_open = is_open
        self.calls: list[tuple[str, str]] = []
        self.waiting = 0

    def count(self, verb: str) -> int:
        return sum(each == verb for each, _ in self.calls)

    async def _around(self, verb: str, key: str, call: Callable[[], Awaitable[Any]]) -> Any:
        if verb in ("get", "get_range", "put", "list"):
            await self._pass(verb, key)
        return await call()

    async def _pass(self, verb: str, key: str) -> None:
        self.calls.append((verb, key))
        self.waiting += 1
        try:
            while not self.is_open:
                await asyncio.sleep(0.002)
        finally:
            self.waiting -= 1


class FailingStore(WrapperStore):
    """A store that raises ``error`` from every call."""

    def __init__(self, error: Exception) -> None:
        super().__init__(MemoryStore())
        self.error = error

    async def _around(self, verb: str, key: str, call: Callable[[], Awaitable[Any]]) -> Any:
        raise self.error


class DenyingStore(WrapperStore):
    """A store that denies calls: ``denies`` gets the verb and the key of each."""

    def __init__(self, inner: Store, denies: Callable[[str, str], bool]) -> None:
        super().__init__(inner)
        self._denies = denies

    async def _around(self, verb: str, key: str, call: Callable[[], Awaitable[Any]]) -> Any:
        if self._denies(verb, key):
            raise AccessDeniedError("not allowed", op=verb, store=self.url, key=key)
        return await call()


class CountingStore(WrapperStore):
    """A store that counts reads of headers, listings and listed names."""

    heads = listings = listed = 0

    async def get_range(self, key: str, length: int) -> Any:
        self.heads += 1
        return await super().get_range(key, length)

    async def list(self, prefix: str = "") -> Any:
        self.listings += 1
        async for info in super().list(prefix):
            self.listed += 1
            yield info


class RacyStore(MemoryStore):
    """A store that checks, then creates: several racing creators win, the last object stays."""

    async def put(self, key: str, data: Buffer, *, mode: PutMode = "overwrite", **_: Any) -> None:
        if mode == "create" and await self.head(key) is None:
            await asyncio.sleep(0.001)
            mode = "overwrite"
        await super().put(key, data, mode=mode)

    async def atomic_create(self) -> bool:
        return False


async def variants(store: Store) -> set[str]:
    """Return the variants of ``KEY`` that a reader finds."""
    found = set()
    async for info in store.list(entries.name_prefix(KEY)):
        data = await store.get(info.key)
        assert data is not None
        found.add(entries.verify(info.key, data).header.variant)
    return found


def put(store: Store, name: str, data: Buffer) -> None:
    """Write an object to ``store`` without the cache over it."""
    asyncio.run(store.put(name, data))


def remove(store: Store, name: str) -> None:
    """Remove an object as another program does, such as a rule of the bucket."""
    asyncio.run(store.delete(name))


def names(store: Store) -> list[str]:
    """Return the names of the objects in ``store``."""

    async def listed() -> list[str]:
        return [info.key async for info in store.list()]

    return asyncio.run(listed())


def holds(store: Store, name: str) -> bool:
    """Return whether ``store`` has an object of that name."""
    return asyncio.run(store.head(name)) is not None
