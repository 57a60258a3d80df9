"""A store in a dict: for tests, and for trying s3cache out without a bucket."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, overload

from s3cache.errors import PreconditionError
from s3cache.store._base import (
    Admit,
    Buffer,
    NotAdmitted,
    ObjectInfo,
    PutMode,
    check_key,
    check_range,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

__all__ = ["MemoryStore"]


class MemoryStore:
    """Objects in this process's memory; they are gone when the store is.

    Objects are copied in and immutable from then on. ``put`` is atomic and
    :meth:`atomic_create` holds, because no call gives up the event loop half-way.
    """

    def __init__(self, name: str = "") -> None:
        self._url = f"memory://{name}"
        self._objects: dict[str, tuple[bytes, float]] = {}

    def __repr__(self) -> str:
        return f"MemoryStore({self._url!r})"

    @property
    def url(self) -> str:
        return self._url

    @overload
    async def get(self, key: str) -> Buffer | None: ...
    @overload
    async def get(self, key: str, admit: Admit | None) -> Buffer | NotAdmitted | None: ...
    async def get(self, key: str, admit: Admit | None = None) -> Buffer | NotAdmitted | None:
        value = self._objects.get(check_key(key))
        if value is None:
            return None
        data, _ = value
        return data if admit is None or admit(len(data)) else NotAdmitted(len(data))

    async def get_range(self, key: str, start: int, length: int) -> Buffer | None:
        check_range(start, length)
        value = self._objects.get(check_key(key))
        return None if value is None else value[0][start : start + length]

    async def head(self, key: str) -> ObjectInfo | None:
        value = self._objects.get(check_key(key))
        return None if value is None else ObjectInfo(key, len(value[0]), value[1])

    async def put(
        self,
        key: str,
        data: Buffer,
        *,
        mode: PutMode = "overwrite",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        if check_key(key) in self._objects and mode == "create":
            raise PreconditionError("exists already", op="put", store=self._url, key=key)
        self._objects[key] = (bytes(data), time.time())

    async def delete(self, key: str) -> None:
        self._objects.pop(check_key(key), None)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        for key, (data, modified) in tuple(self._objects.items()):
            if key.startswith(prefix):
                yield ObjectInfo(key, len(data), modified)

    async def atomic_create(self) -> bool:
        return True

    async def aclose(self) -> None:
        """Keep the objects: a closed store may be looked at, and there is nothing to release."""
