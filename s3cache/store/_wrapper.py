"""What all wrappers share: every call goes to ``inner`` unless the wrapper says otherwise."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from s3cache.store._base import Buffer, ObjectInfo, PutMode, Store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

__all__ = ["WrapperStore", "close_listing", "listing"]


class WrapperStore:
    """Delegates the whole protocol to ``inner``; closing the wrapper closes ``inner``."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    @property
    def url(self) -> str:
        return self.inner.url

    async def get(self, key: str) -> Buffer | None:
        return await self.inner.get(key)

    async def get_range(self, key: str, start: int, length: int) -> Buffer | None:
        return await self.inner.get_range(key, start, length)

    async def head(self, key: str) -> ObjectInfo | None:
        return await self.inner.head(key)

    async def put(
        self,
        key: str,
        data: Buffer,
        *,
        mode: PutMode = "overwrite",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        await self.inner.put(key, data, mode=mode, metadata=metadata)

    async def delete(self, key: str) -> None:
        await self.inner.delete(key)

    def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        return self.inner.list(prefix)

    async def atomic_create(self) -> bool:
        return await self.inner.atomic_create()

    async def aclose(self) -> None:
        await self.inner.aclose()


async def close_listing(items: AsyncIterator[ObjectInfo]) -> None:
    """Close a listing that may not have been read to its end.

    The protocol promises an iterator; most stores give a generator, which holds a connection or
    a directory open until it is closed.
    """
    aclose = getattr(items, "aclose", None)
    if aclose is not None:
        await aclose()


@asynccontextmanager
async def listing(store: Store, prefix: str) -> AsyncIterator[AsyncIterator[ObjectInfo]]:
    """``store.list(prefix)``, closed on the way out."""
    items = store.list(prefix)
    try:
        yield items
    finally:
        await close_listing(items)
