"""What is to be uploaded: objects that are pending on the disk, bytes in memory, their order."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator
from typing import Protocol

from s3cache.errors import ClosedError, NoSpaceError, S3CacheError
from s3cache.store import Buffer, ObjectInfo

__all__ = ["Backlog", "PendingDisk", "UploadQueue"]

# The part of the memory for uploads that may hold copies of what has just been written to the disk.
_COPIES_PART = 0.25
_LOCKS = 32


class PendingDisk(Protocol):
    """What a backlog needs of the disk; see :class:`s3cache.tier.DiskTier`."""

    def put_pending(self, name: str, data: Buffer) -> None: ...
    def peek(self, name: str) -> bytes | None: ...
    def objects(self) -> Iterable[ObjectInfo]: ...
    def delete(self, name: str) -> None: ...
    def quarantine(self, name: str) -> None: ...
    def uploaded(self, name: str) -> None: ...
    def pending(self) -> list[str]: ...
    def adopt(self, limit: int | None = None, but: Collection[str] = ()) -> list[str]: ...
    def give_back(self, name: str) -> None: ...
    def note(self, name: str) -> bytes | None: ...


class Backlog:
    """Objects to upload: each is pending on the disk, or waits in memory and dies with the process.

    Any thread may call any method. Those that use the disk raise ``StoreError`` where it fails.

    Args:
        disk: holds bytes, and what is pending; ``None`` if there is no local tier.
        max_count: objects in memory.
        max_bytes: their bytes together.
    """

    def __init__(self, disk: PendingDisk | None, *, max_count: int, max_bytes: int) -> None:
        self.disk = disk
        # What is not on the disk at all.
        self._only_copies = _HeldBytes(max_count=max_count, max_bytes=max_bytes)
        # What is, as far as there is memory: it need not be read back.
        self._copies = _HeldBytes(max_count=max_count, max_bytes=int(_COPIES_PART * max_bytes))
        # Held while an object changes together with whether it is pending, which takes as long as
        # the disk does: with one lock, every upload that ends would wait for each save.
        self._locks = [threading.Lock() for _ in range(_LOCKS)]
        # How often each object was put here that is not uploaded: shows the end of an upload
        # whether the object was replaced meanwhile.
        self._versions: Counter[str] = Counter()
        self._arriving: set[str] = set()  # being put: the caller queues them, too
        self._is_closed = False

    def put(self, name: str, data: Buffer) -> None:
        """Write the object to the disk, pending.

        Raises:
            ClosedError: the backlog was closed; nothing was written.
        """
        assert self.disk is not None
        with self._lock(name):
            if self._is_closed:
                raise ClosedError("the cache was closed")
            self._arriving.add(name)
            try:
                self.disk.put_pending(name, data)
                self._only_copies.remove(name)  # it is older
                if not self._copies.replace(name, data):
                    self._copies.remove(name)
                # Last: an upload that sees the new version reads the new bytes.
                self._versions[name] += 1
            finally:
                self._arriving.discard(name)

    def put_in_memory(self, name: str, data: Buffer) -> None:
        """Keep a copy of the object's bytes, which dies with the process.

        Raises:
            NoSpaceError: there is no more memory for that.
            ClosedError: the backlog was closed.
        """
        if self._is_closed:
            raise ClosedError("the cache was closed")
        if not self._only_copies.replace(name, data):
            raise NoSpaceError(f"the upload queue is full: {self._only_copies}", op="put", key=name)

    def remove_from_memory(self, name: str) -> None:
        """Undo :meth:`put_in_memory`."""
        self._only_copies.remove(name)

    @property
    def in_memory(self) -> int:
        """How many objects are in memory alone."""
        return len(self._only_copies)

    def is_in_memory(self, name: str) -> bool:
        """Return whether the object is in memory alone."""
        return name in self._only_copies

    def is_own(self, name: str) -> bool:
        """Return whether it was put here and is not uploaded yet; else it was adopted."""
        return self._versions[name] > 0 or name in self._only_copies

    def version(self, name: str) -> int:
        """Return a number that grows whenever the object on the disk is replaced."""
        return self._versions[name]

    def read_memory(self, name: str) -> Buffer | None:
        """Return the object's bytes, if they need not be read from the disk."""
        return self._only_copies.get(name) or self._copies.get(name)

    def finish(self, name: str, version: int, data: Buffer | None) -> None:
        """Forget what was uploaded, unless it was replaced since it had that ``version``."""
        self._copies.remove_if_same(name, data)
        from_memory = self._only_copies.remove_if_same(name, data)
        if self.disk is None:
            return
        # What waited in memory did so because the disk fails; it is seldom pending there as well.
        with contextlib.suppress(*([S3CacheError] if from_memory else [])), self._lock(name):
            if self._versions[name] == version:
                self.disk.uploaded(name)
                del self._versions[name]

    def set_aside(self, name: str, version: int, data: Buffer | None) -> None:
        """Quarantine what proved damaged, unless it was replaced meanwhile; then forget it."""
        if self.disk is not None and name not in self._only_copies:
            with self._lock(name):
                if self._versions[name] == version:
                    self.disk.quarantine(name)
        self.finish(name, version, data)

    def remove(self, name: str) -> None:
        """Remove the object, and forget it, if no upload of it is under way."""
        self._only_copies.remove(name)
        self._copies.remove(name)
        if self.disk is not None:
            with self._lock(name):
                self.disk.uploaded(name)
                self.disk.delete(name)
                del self._versions[name]

    def expect(self, names: Iterable[str]) -> None:
        """Count objects as put here that were made pending before there was a backlog."""
        self._versions.update({*names})

    def known(self) -> set[str]:
        """Return what was put here and is not uploaded yet; asks no disk."""
        return {*self._versions, *self._only_copies.names()}

    def pending(self) -> set[str]:
        """Return what was put here or is pending on the disk, as far as the disk answers."""
        known = self.known()
        if self.disk is not None:
            with contextlib.suppress(S3CacheError):
                known.update(self.disk.pending())
        return known

    def sizes_pending(self, but: Collection[str]) -> dict[str, int]:
        """Return what is pending on the disk, less ``but`` and what is being put just now.

        Returns:
            By name the size, 0 where it is not known.
        """
        names = [] if self.disk is None else self.disk.pending()
        arriving = self._arriving
        return self._sizes([name for name in names if name not in but and name not in arriving])

    def adopt(self, limit: int | None, but: Collection[str]) -> dict[str, int]:
        """Take over what processes that are gone have left to upload, by name with its size.

        Args:
            limit: so many at most.
            but: names to leave alone.
        """
        return {} if self.disk is None else self._sizes(self.disk.adopt(limit, but))

    def give_back(self, name: str) -> bool:
        """Leave what was adopted to another process; return False if it is our own by now."""
        if self.disk is None:
            return False
        with self._lock(name):
            if self.is_own(name):
                return False
            self.disk.give_back(name)
        return True

    def close(self, timeout_s: float) -> None:
        """Take nothing any more. What is pending stays so, for others to adopt.

        What hangs on the disk for so long may still come to its end, and then is pending too.
        """
        end = time.monotonic() + timeout_s
        with contextlib.ExitStack() as no_puts:
            for lock in self._locks:
                if lock.acquire(timeout=max(end - time.monotonic(), 0)):
                    no_puts.callback(lock.release)
            self._is_closed = True

    def _sizes(self, names: list[str]) -> dict[str, int]:
        if not names or self.disk is None:
            return {}
        sizes = {info.key: info.size for info in self.disk.objects()}
        return {name: sizes.get(name, 0) for name in names}

    def _lock(self, name: str) -> threading.Lock:
        return self._locks[hash(name) % _LOCKS]


class UploadQueue:
    """Which objects are to be uploaded: each is queued, active or parked. Used on the loop only.

    Args:
        max_count: objects queued; those that are pending on the disk wait there instead.
        max_bytes: memory that all uploads take.

    Attributes:
        sizes: bytes of all that is queued or active.
        active: what is under way.
        parked: what was refused and waits to be tried again, with its bytes; in that order.
        has_overflowed: something was left on the disk.
    """

    def __init__(self, *, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._queue: deque[str] = deque()
        self._replaced: set[str] = set()  # while active
        self.sizes: dict[str, int] = {}
        self.active: set[str] = set()
        self.parked: dict[str, int] = {}
        self.has_overflowed = False

    def __iter__(self) -> Iterator[str]:
        return iter([*self.sizes, *self.parked])

    def __contains__(self, name: str) -> bool:
        return name in self.sizes or name in self.parked

    def __len__(self) -> int:
        return len(self.sizes) + len(self.parked)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left that can be uploaded."""
        return not (self._queue or self.active or self.has_overflowed)

    @property
    def has_room_again(self) -> bool:
        """Whether there is room for a good many of those that were left on the disk."""
        return self.has_overflowed and len(self._queue) <= self._max_count // 2

    @property
    def may_start(self) -> bool:
        """Whether there is another object, and memory for its bytes beside those under way."""
        if not self._queue or not self.active:
            return bool(self._queue)
        busy = sum(self.sizes[name] for name in self.active)
        return busy + self.sizes[self._queue[0]] <= (1 - _COPIES_PART) * self._max_bytes

    def add(self, name: str, size: int, *, is_on_disk: bool) -> bool:
        """Return whether the object was queued now, and not known before or left on the disk."""
        self.parked.pop(name, None)
        if name in self.active:
            self._replaced.add(name)
            return False
        is_new = name not in self.sizes
        if is_new and is_on_disk and len(self._queue) >= self._max_count:
            self.has_overflowed = True
            return False
        self.sizes[name] = size
        if is_new:
            self._queue.append(name)
        return is_new

    def take(self) -> str:
        """Return the next object, which is active from now on."""
        name = self._queue.popleft()
        self.active.add(name)
        return name

    def put_back(self, name: str) -> None:
        """Have the object tried again, before all others."""
        self._queue.appendleft(name)
        self._replaced.discard(name)

    def park(self, name: str) -> None:
        """Give the object up for now."""
        self.parked[name] = self.sizes[name]

    def end(self, name: str) -> tuple[int, bool]:
        """Forget an active object; return its size, and whether it was replaced meanwhile."""
        was_replaced = name in self._replaced
        self._replaced.discard(name)
        self.active.discard(name)
        return self.sizes.pop(name), was_replaced


class _HeldBytes:
    """Objects by name, at most ``max_count`` of ``max_bytes`` together; for any thread."""

    def __init__(self, *, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._mutex = threading.Lock()
        self._objects: dict[str, bytes] = {}
        self._bytes = 0

    def __str__(self) -> str:
        return f"{len(self._objects)} objects of {self._bytes} bytes wait in memory"

    def __len__(self) -> int:
        return len(self._objects)

    def __contains__(self, name: str) -> bool:
        return name in self._objects

    def names(self) -> list[str]:
        return [*self._objects]

    def get(self, name: str) -> bytes | None:
        return self._objects.get(name)

    def replace(self, name: str, data: Buffer) -> bool:
        """Hold a copy of ``data``, in place of what was held; return False if it is too much."""
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
        with self._mutex:
            self._bytes -= len(self._objects.pop(name, b""))

    def remove_if_same(self, name: str, data: Buffer | None) -> bool:
        """Remove the object, unless it was replaced since :meth:`get` gave ``data``."""
        with self._mutex:
            is_same = data is not None and self._objects.get(name) is data
            if is_same:
                self._bytes -= len(self._objects.pop(name))
            return is_same
