"""The disk tier for whoever must not hang with its disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import TypeVar

from s3cache.errors import StoreError
from s3cache.frame import Frame
from s3cache.stats import Usage
from s3cache.store import Buffer, ObjectInfo, Patience
from s3cache.tier._disk import DiskTier, Found

__all__ = ["PatientDiskTier"]

_T = TypeVar("_T")

# A slow disk is no disk that hangs: a second more for so many bytes.
_BYTES_A_SECOND = 32 << 20
# What looks at all that is there, for nobody who waits.
_SCAN_S = 120.0


class PatientDiskTier(DiskTier):
    """A :class:`DiskTier` of which no method takes longer than a few seconds.

    Raises, in every method:
        TransientError: the disk has not answered in time; what was begun goes on, and may come to
            its end later.
        CircuitOpenError: it hangs; nothing was tried.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        max_bytes: int,
        max_files: int,
        namespace: str = "",
        note: bytes = b"",
    ) -> None:
        self._patience = Patience.of(os.path.abspath(os.fspath(root)))
        open_tier = super().__init__
        try:
            self._patience.call(
                lambda: open_tier(
                    root,
                    max_bytes=max_bytes,
                    max_files=max_files,
                    namespace=namespace,
                    note=note,
                )
            )
        except BaseException:
            self._patience.release()
            raise

    def _wait(self, work: Callable[[], _T], size: int = 0) -> _T:
        return self._patience.call(work, more_s=size / _BYTES_A_SECOND)

    def usage(self) -> Usage:
        return self._wait(super().usage)

    def trim(self) -> int:
        return self._patience.call(super().trim, more_s=_SCAN_S)

    def load(self, name: str) -> Frame | None:
        load = super().load
        return self._wait(lambda: load(name))

    def search(
        self, names: Sequence[str], prefix: str, *, head: Callable[[bytes], None] | None = None
    ) -> Found:
        """As of a :class:`DiskTier`; ``head`` is called by who waits, while the rest is read."""
        search = super().search
        if head is None:
            return self._wait(lambda: search(names, prefix))

        def for_who_waits(first_bytes: bytes) -> None:
            self._patience.meanwhile(partial(head, first_bytes))

        return self._wait(lambda: search(names, prefix, head=for_who_waits))

    def get(self, name: str) -> bytes | None:
        get = super().get
        return self._wait(lambda: get(name))

    def peek(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        peek = super().peek
        return self._wait(lambda: peek(name, start, length))

    def holds(self, name: str) -> bool:
        holds = super().holds
        return self._wait(lambda: holds(name))

    def objects(self, prefix: str = "") -> Iterator[ObjectInfo]:
        objects = super().objects
        more_s = 0.0 if prefix else _SCAN_S
        return iter(self._patience.call(lambda: [*objects(prefix)], more_s=more_s))

    def put(self, name: str, data: Buffer) -> None:
        put = super().put
        self._wait(lambda: put(name, data), memoryview(data).nbytes)

    def put_all(self, objects: Sequence[tuple[str, Buffer]]) -> dict[str, StoreError]:
        put_all = super().put_all
        size = sum(memoryview(data).nbytes for _, data in objects)
        return self._wait(lambda: put_all(objects), size)

    def put_pending(self, name: str, data: Buffer) -> None:
        put_pending = super().put_pending
        self._wait(lambda: put_pending(name, data), memoryview(data).nbytes)

    def delete(self, name: str) -> None:
        delete = super().delete
        self._wait(lambda: delete(name))

    def quarantine(self, name: str) -> None:
        quarantine = super().quarantine
        self._wait(lambda: quarantine(name))

    def uploaded(self, name: str) -> None:
        uploaded = super().uploaded
        self._wait(lambda: uploaded(name))

    def pending(self) -> list[str]:
        return self._wait(super().pending)

    def recorded(self) -> set[str]:
        return self._wait(super().recorded)

    def adopt(self, limit: int | None = None, but: Collection[str] = ()) -> list[str]:
        adopt = super().adopt
        return self._wait(lambda: adopt(limit, but))

    def give_back(self, name: str) -> None:
        give_back = super().give_back
        self._wait(lambda: give_back(name))

    def note(self, name: str) -> bytes | None:
        note = super().note
        return self._wait(lambda: note(name))

    def close(self, timeout_s: float | None = None) -> None:
        """Let go as :meth:`DiskTier.close` does, unless the disk hangs: then when it is back."""
        limit_s = self._patience.limit_s
        less_s = limit_s - min(limit_s if timeout_s is None else timeout_s, limit_s)
        with contextlib.suppress(StoreError):
            self._patience.call(super().close, more_s=-less_s)
        self._patience.release()
