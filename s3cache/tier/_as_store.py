"""The local tier as a store, for whoever looks after it: its books stay right."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import overload

from s3cache.errors import PreconditionError
from s3cache.store import Admit, Buffer, NotAdmitted, ObjectInfo, PutMode
from s3cache.tier._disk import DiskTier

__all__ = ["TierStore"]


class TierStore:
    """A :class:`~s3cache.store.Store` of what a tier holds; closing it closes the tier.

    What is read here does not count as used. What is removed is not uploaded any more.
    """

    def __init__(self, tier: DiskTier) -> None:
        self._tier = tier

    @property
    def url(self) -> str:
        return self._tier.url

    @overload
    async def get(self, key: str) -> Buffer | None: ...
    @overload
    async def get(self, key: str, admit: Admit | None) -> Buffer | NotAdmitted | None: ...
    async def get(self, key: str, admit: Admit | None = None) -> Buffer | NotAdmitted | None:
        data = await asyncio.to_thread(self._tier.peek, key)
        if data is not None and admit is not None and not admit(len(data)):
            return NotAdmitted(len(data))
        return data

    async def get_range(self, key: str, start: int, length: int) -> Buffer | None:
        return await asyncio.to_thread(self._tier.peek, key, start, length)

    async def head(self, key: str) -> ObjectInfo | None:
        found = await asyncio.to_thread(lambda: [*self._tier.objects(key)])
        return next((info for info in found if info.key == key), None)

    async def put(
        self,
        key: str,
        data: Buffer,
        *,
        mode: PutMode = "overwrite",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        if mode == "create" and await asyncio.to_thread(self._tier.holds, key):
            raise PreconditionError("already exists", op="put", store=self.url, key=key)
        await asyncio.to_thread(self._tier.put, key, data)

    async def recorded(self) -> set[str]:
        """Names that are still to be uploaded: nobody else has those."""
        return await asyncio.to_thread(self._tier.recorded)

    async def delete(self, key: str) -> None:
        await asyncio.to_thread(self._remove, key)

    def _remove(self, key: str) -> None:
        self._tier.uploaded(key)
        self._tier.delete(key)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        for info in await asyncio.to_thread(lambda: [*self._tier.objects(prefix)]):
            yield info

    async def atomic_create(self) -> bool:
        return False

    async def aclose(self) -> None:
        await asyncio.to_thread(self._tier.close)
