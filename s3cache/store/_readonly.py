"""A store that can be looked at, not changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from s3cache.errors import ReadOnlyError
from s3cache.store._base import Buffer, PutMode, WrapperStore, check_key

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ReadOnlyStore"]


class ReadOnlyStore(WrapperStore):
    """Raises :class:`~s3cache.errors.ReadOnlyError` from ``put`` and ``delete``; reads pass.

    This protects against mistakes, not against code in the same process. Readers that are not
    trusted need credentials that cannot write.
    """

    async def put(
        self,
        key: str,
        data: Buffer,
        *,
        mode: PutMode = "overwrite",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self._refuse("put", key)

    async def delete(self, key: str) -> None:
        self._refuse("delete", key)

    async def atomic_create(self) -> bool:
        """``False``: nobody can create here, and a store may have to write to find out."""
        return False

    def _refuse(self, op: str, key: str) -> NoReturn:
        raise ReadOnlyError("opened read-only", op=op, store=self.url, key=check_key(key))
