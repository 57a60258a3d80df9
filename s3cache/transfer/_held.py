"""Bytes that wait for their upload in memory."""

from __future__ import annotations

import threading

from s3cache.errors import NoSpaceError
from s3cache.store._base import Buffer

__all__ = ["HeldBytes"]


class HeldBytes:
    """Objects by name, at most ``max_count`` of ``max_bytes`` together; they die with the process.

    Any thread may call any method.
    """

    def __init__(self, *, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._mutex = threading.Lock()
        self._objects: dict[str, bytes] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._objects)

    def __contains__(self, name: str) -> bool:
        return name in self._objects

    def get(self, name: str) -> bytes | None:
        return self._objects.get(name)

    def admit(self, name: str, data: Buffer) -> None:
        """Hold a copy of ``data``, in place of what was held under that name.

        Raises:
            NoSpaceError: that would be too much.
        """
        if not self.replace(name, data):
            raise NoSpaceError(
                f"the upload queue is full: {len(self._objects)} objects of {self._bytes} "
                "bytes wait in memory",
                op="put",
                key=name,
            )

    def replace(self, name: str, data: Buffer) -> bool:
        """Like :meth:`admit`, but false if that would be too much; what was held stays then."""
        held = bytes(data)  # the caller may reuse its buffer; bytes are not copied
        with self._mutex:
            old = self._objects.get(name)
            count = len(self._objects) + (old is None)
            total = self._bytes + len(held) - len(old or b"")
            if count > self._max_count or total > self._max_bytes:
                return False
            self._objects[name] = held
            self._bytes = total
            return True

    def remove(self, name: str) -> None:
        """Let go of the object, if it is held."""
        with self._mutex:
            self._bytes -= len(self._objects.pop(name, b""))

    def remove_if_same(self, name: str, data: Buffer | None) -> bool:
        """Let go of the object, unless it was replaced since :meth:`get` gave ``data``."""
        with self._mutex:
            same = data is not None and self._objects.get(name) is data
            if same:
                self._bytes -= len(self._objects.pop(name))
            return same
