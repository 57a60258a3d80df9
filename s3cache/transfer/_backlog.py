"""Pending uploads: objects with a record on the disk, bytes in memory, and their order."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Container, Iterable, Iterator
from typing import Protocol

from s3cache.errors import ClosedError, NoSpaceError, S3CacheError
from s3cache.store import Buffer, ObjectInfo

__all__ = ["Backlog", "RecordingDisk", "UploadQueue"]

# Of the memory that uploads may take, for what waits and has just been written to the disk.
_FRESH_PART = 0.25
_RECORD_LOCKS = 32


class RecordingDisk(Protocol):
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
    """Objects to upload: each has a record on the disk, or waits in memory and dies with us.

    Any thread may call any method.

    Args:
        disk: holds bytes and records; ``None`` if there is no local tier.
        max_count: objects in memory.
        max_bytes: their bytes together.
    """

    def __init__(self, disk: RecordingDisk | None, *, max_count: int, max_bytes: int) -> None:
        self._disk = disk
        # Of objects without a record, all there is. They die with the process.
        self._held = _HeldBytes(max_count=max_count, max_bytes=max_bytes)
        # Of objects with a record, as many as fit: those need not be read back from the disk.
        self._fresh = _HeldBytes(max_count=max_count, max_bytes=int(_FRESH_PART * max_bytes))
        # Held while an object and its record change together, which takes as long as the disk:
        # with one lock, every upload that ends would wait for each save. By the version, the end
        # of an upload knows whether the object was replaced meanwhile.
        self._record_locks = [threading.Lock() for _ in range(_RECORD_LOCKS)]
        self._versions: Counter[str] = Counter()  # of all objects put here and not uploaded
        self._arriving: set[str] = set()  # being put: who puts them hands them over, too
        self._closed = False

    def put(self, name: str, data: Buffer) -> None:
        """Write the object to the disk, on record as to be uploaded.

        Raises:
            StoreError: the disk could not take it.
            ClosedError: the backlog was closed; nothing was written.
        """
        assert self._disk is not None
        with self._record_lock(name), self._arrival(name):
            if self._closed:
                raise ClosedError("the cache was closed")
            self._disk.put_pending(name, data)
            self._held.remove(name)  # it is older
            if not self._fresh.replace(name, data):
                self._fresh.remove(name)
            # Last: an upload that sees the new version reads the new bytes.
            self._versions[name] += 1

    def put_in_memory(self, name: str, data: Buffer) -> None:
        """Keep a copy of the object's bytes, which dies with the process.

        Raises:
            NoSpaceError: there is no more memory for that.
            ClosedError: the backlog was closed.
        """
        if self._closed:
            raise ClosedError("the cache was closed")
        if not self._held.replace(name, data):
            raise NoSpaceError(f"the upload queue is full: {self._held}", op="put", key=name)

    def forget_in_memory(self, name: str) -> None:
        """Let go of what :meth:`put_in_memory` keeps."""
        self._held.remove(name)

    @property
    def in_memory(self) -> int:
        """How many objects have no record."""
        return len(self._held)

    def is_in_memory(self, name: str) -> bool:
        """Whether there is no record of the object."""
        return name in self._held

    def version(self, name: str) -> int:
        """A number that grows whenever the object on record is replaced."""
        return self._versions[name]

    def bytes_in_memory(self, name: str) -> Buffer | None:
        """The object's bytes, if they need not be read from the disk."""
        return self._held.get(name) or self._fresh.get(name)

    def read(self, name: str) -> Buffer | None:
        """The object's bytes on the disk, ``None`` where there is no such object (any more)."""
        return None if self._disk is None else self._disk.peek(name)

    def finish(self, name: str, version: int, data: Buffer | None) -> None:
        """Forget what was uploaded, unless it was replaced since it had that ``version``."""
        self._fresh.remove_if_same(name, data)
        from_memory = self._held.remove_if_same(name, data)
        if self._disk is None:
            return
        # What was held in memory was so because the disk fails; it seldom has a record too.
        with contextlib.suppress(*([S3CacheError] if from_memory else [])), self._record_lock(name):
            if self._versions[name] == version:
                self._disk.uploaded(name)
                del self._versions[name]

    def expect(self, names: Iterable[str]) -> None:
        """Count objects as put here that were put on the disk, on record, before we were made."""
        self._versions.update({*names})

    def take_back(self, name: str) -> None:
        """Forget the object and remove it, if no upload of it is under way.

        Raises:
            StoreError: the disk fails.
        """
        self._held.remove(name)
        self._fresh.remove(name)
        if self._disk is not None:
            with self._record_lock(name):
                self._disk.uploaded(name)
                self._disk.delete(name)
                del self._versions[name]

    def set_aside(self, name: str, version: int, data: Buffer | None) -> None:
        """Forget what proved damaged, and put it away, unless it was replaced meanwhile."""
        if self._disk is not None and name not in self._held:
            with self._record_lock(name):
                if self._versions[name] == version:
                    self._disk.quarantine(name)
        self.finish(name, version, data)

    def known(self) -> set[str]:
        """Return what this process has put here and not uploaded yet; asks no disk."""
        return {*self._versions, *self._held.names()}

    def recorded(self) -> set[str]:
        """Names of what this process has put here or has on record, and not uploaded yet.

        As far as the disk tells.
        """
        known = self.known()
        if self._disk is not None:
            with contextlib.suppress(S3CacheError):
                known.update(self._disk.pending())
        return known

    def records(self, but: Container[str]) -> dict[str, int]:
        """What this process has on record, by name with its size, 0 where it is not known.

        Less what is being put just now.

        Args:
            but: names to leave out.

        Raises:
            StoreError: the disk fails.
        """
        names = [] if self._disk is None else self._disk.pending()
        return self._sized(
            [name for name in names if name not in but and name not in self._arriving]
        )

    def adopt(self, limit: int | None, but: Collection[str]) -> dict[str, int]:
        """Take over what processes that are gone have left to upload, by name with its size.

        Args:
            limit: so many at most.
            but: names to leave alone.

        Raises:
            StoreError: the disk fails.
        """
        return {} if self._disk is None else self._sized(self._disk.adopt(limit, but))

    def give_back(self, name: str) -> bool:
        """Leave what was adopted to another process; false if it has become our own meanwhile.

        Raises:
            StoreError: the disk fails.
        """
        if self._disk is None:
            return False
        with self._record_lock(name):
            if self.is_own(name):
                return False
            self._disk.give_back(name)
        return True

    def is_own(self, name: str) -> bool:
        """Whether this process has put it here, and not uploaded it yet; else it was adopted."""
        return self._versions[name] > 0 or name in self._held

    def note(self, name: str) -> bytes | None:
        """Return the note in our record of the object; ``None`` if we have no record.

        Raises:
            StoreError: the disk fails.
        """
        return None if self._disk is None else self._disk.note(name)

    def close(self, timeout_s: float) -> None:
        """Take nothing any more. Records stay, for others to adopt.

        What hangs on the disk for so long may still come to its end, and then is on record too.
        """
        end = time.monotonic() + timeout_s
        with contextlib.ExitStack() as no_puts:
            for lock in self._record_locks:
                if lock.acquire(timeout=max(end - time.monotonic(), 0)):
                    no_puts.callback(lock.release)
            self._closed = True

    def _sized(self, names: list[str]) -> dict[str, int]:
        if not names or self._disk is None:
            return {}
        sizes = {info.key: info.size for info in self._disk.objects()}
        return {name: sizes.get(name, 0) for name in names}

    @contextlib.contextmanager
    def _arrival(self, name: str) -> Iterator[None]:
        self._arriving.add(name)  # one at a time: the lock of its record is held
        try:
            yield
        finally:
            self._arriving.discard(name)

    def _record_lock(self, name: str) -> threading.Lock:
        return self._record_locks[hash(name) % _RECORD_LOCKS]


class UploadQueue:
    """Which objects are to be uploaded: each is queued, active or parked. Used on the loop only.

    Args:
        max_count: objects queued; those that have a record wait there instead.
        max_bytes: memory that all uploads take.

    Attributes:
        sizes: bytes of all that is queued or active.
        active: what is under way.
        parked: what was refused and waits to be tried again, with its bytes; in that order.
        overflowed: there are records that did not fit.
    """

    def __init__(self, *, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._queue: deque[str] = deque()
        self._replaced: set[str] = set()  # while active
        self.sizes: dict[str, int] = {}
        self.active: set[str] = set()
        self.parked: dict[str, int] = {}
        self.overflowed = False

    @property
    def pending(self) -> int:
        """How many objects there are in all."""
        return len(self.sizes) + len(self.parked)

    @property
    def is_idle(self) -> bool:
        """Nothing is left that can be uploaded."""
        return not (self._queue or self.active or self.overflowed)

    @property
    def has_room_again(self) -> bool:
        """There is room for a good many of the records that did not fit."""
        return self.overflowed and len(self._queue) <= self._max_count // 2

    @property
    def may_start(self) -> bool:
        """There is another object, and memory for its bytes beside those under way."""
        if not self._queue or not self.active:
            return bool(self._queue)
        busy = sum(self.sizes[name] for name in self.active)
        return busy + self.sizes[self._queue[0]] <= (1 - _FRESH_PART) * self._max_bytes

    def add(self, name: str, size: int, *, has_record: bool) -> bool:
        """Whether the object was queued just now, and not known before or left to its record."""
        self.parked.pop(name, None)
        if name in self.active:
            self._replaced.add(name)
            return False
        if name not in self.sizes and has_record and len(self._queue) >= self._max_count:
            self.overflowed = True
            return False
        is_new = name not in self.sizes
        self.sizes[name] = size
        if is_new:
            self._queue.append(name)
        return is_new

    def take(self) -> str:
        """The next object, which is active until :meth:`release`."""
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
        """The object's size, and whether it was replaced while it was active; forgets it."""
        replaced = name in self._replaced
        self._replaced.discard(name)
        self.active.discard(name)
        return self.sizes.pop(name), replaced

    def release(self, name: str) -> None:
        """The object is no longer under way."""
        self.active.discard(name)


class _HeldBytes:
    """Objects by name, at most ``max_count`` of ``max_bytes`` together.

    Any thread may call any method.
    """

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
        """Hold a copy of ``data``, in place of what was held; false if that would be too much."""
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
