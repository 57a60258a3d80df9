"""The local tier: a bounded, least-recently-used directory that knows what is still to upload.

Beside the ``objects/`` and ``staging/`` of the :class:`Directory` underneath, its root holds::

    usage               how much is in objects/            (s3cache.tier._accounts)
    pending/<owner>/    what is not uploaded yet           (s3cache.tier._pending)
    quarantine/         the last few files found corrupt
    CACHEDIR.TAG        tells backup programs to leave all this out

An object's modification time is its last use. Evicting in that order needs a scan of all objects;
one scan finds the oldest tenth, which lasts for as many evictions.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias
from urllib.parse import quote

from s3cache.errors import NoSpaceError, ReadOnlyError, StoreError
from s3cache.store._base import Buffer, ObjectInfo
from s3cache.store._directory import Directory, make_private, os_errors
from s3cache.tier._accounts import Accounts, Books, Usage
from s3cache.tier._pending import Pending

__all__ = ["LocalTier"]

#: Entered around the moment a staged file, the second argument, becomes the object.
_Around: TypeAlias = Callable[[str, str], AbstractContextManager[None]]

_QUARANTINED_FILES = 8
# Trimming starts above the first fraction of a bound and ends at the second, so that a writer
# seldom has to make room itself.
_HIGH_WATER = 0.95
_LOW_WATER = 0.90
_SCAN_YIELDS_AT_LEAST = 64
# A trim counts anew where what it found is off the books by this fraction of a bound.
_TOLERANCE = 0.01

# https://bford.info/cachedir/
_CACHEDIR_TAG = b"Signature: 8a477f597d28d172789f06886806bc55\n# Made by s3cache.\n"


class LocalTier:
    """Objects on the local disk, at most ``max_bytes`` and ``max_files`` of them. Synchronous.

    Any number of threads and processes of one machine may use the same root at once. The bounds
    hold for the objects; each writer may have one more in staging. Objects that are recorded as
    pending are never evicted.

    Every method may raise :class:`~s3cache.errors.StoreError`.

    Raises:
        ConfigError: the root is not a private directory of this user.
        StoreError: it cannot be created or written.
    """

    def __init__(self, root: str | os.PathLike[str], *, max_bytes: int, max_files: int) -> None:
        self._directory = Directory(root)
        self.root = self._directory.root
        self.max_bytes = max_bytes
        self.max_files = max_files
        self._accounts = Accounts(self._directory)
        self._pending = Pending(os.path.join(self.root, "pending"))
        self._quarantine = os.path.join(self.root, "quarantine")
        # Names with their last use, latest first; touched only with the accounts locked.
        self._victims: list[ObjectInfo] = []
        with contextlib.suppress(ReadOnlyError), os_errors("open", self.url):
            _tag_as_cache(self.root)
            self._directory.sweep()
        self.usage()  # counts what is there if nobody has yet; fails now if it cannot be kept

    @property
    def url(self) -> str:
        return self._directory.url

    def usage(self) -> Usage:
        """Bytes and files held, exact at the moment of the call."""
        try:
            with os_errors("usage", self.url), self._accounts.locked() as books:
                return books.usage
        except ReadOnlyError:  # nobody keeps books there, and nobody changes it
            sizes = [info.size for info in self.objects()]
            return Usage(sum(sizes), len(sizes))

    # -- objects

    def get(self, name: str) -> bytes | None:
        """The object's bytes, or ``None``; marks it as used just now."""
        data = self._directory.read(name)
        if data is not None:
            # Evicted meanwhile, or a disk that became read-only: the bytes are good all the same.
            with contextlib.suppress(OSError):
                _mark_used(self._directory.path(name))
        return data

    def holds(self, name: str) -> bool:
        """Whether the object is there; does not count as a use."""
        return self._directory.stat(name) is not None

    def get_range(self, name: str, start: int, length: int) -> bytes | None:
        """Some of the object's bytes, or ``None``; does not count as a use."""
        return self._directory.read(name, start, length)

    def objects(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All objects whose name starts with ``prefix``; ``modified`` is the time of last use."""
        return self._directory.walk(prefix)

    def put(self, name: str, data: Buffer) -> None:
        """Write or replace an object, evicting the least recently used to make room.

        It survives this process but perhaps not a power failure, after which it is had again.

        Raises:
            NoSpaceError: it is larger than the tier, or the rest may not be evicted.
        """
        self._put(name, data, durable=False, around=_unrecorded)

    def put_all(self, objects: Sequence[tuple[str, Buffer]]) -> dict[str, StoreError]:
        """Like :meth:`put` for each; returns what failed, by name.

        Others wait while several are written: for objects that are small together.
        """
        if len(objects) == 1:
            [(name, data)] = objects
            try:
                self.put(name, data)
            except StoreError as exc:
                return {name: exc}
            return {}
        failed: dict[str, StoreError] = {}
        with os_errors("put", self.url), self._accounts.locked() as books:
            for name, data in objects:
                try:
                    with self._staged(name, data, False) as staged:
                        self._replace(books, name, staged, data, _unrecorded)
                except StoreError as exc:
                    failed[name] = exc
        return failed

    def put_pending(self, name: str, data: Buffer) -> None:
        """Like :meth:`put`, for an object that nobody else has yet.

        When this returns, the bytes have reached the disk and are recorded as this process's to
        upload until :meth:`uploaded` is called. If the process ends before, exactly one other
        gets the record from :meth:`adopt`. A power failure may take object and record, but never
        leaves a part. Where this fails, an earlier record of the same name stays.
        """
        self._put(name, data, durable=True, around=self._recorded)

    @contextlib.contextmanager
    def _recorded(self, name: str, staged: str) -> Iterator[None]:
        """Record ``name`` as pending before the block; undo that if it fails.

        First the record: one without an object is dropped by whoever would upload it, but an
        object without a record would never be uploaded.
        """
        try:
            added = self._pending.add(name, staged)
        except FileNotFoundError:  # somebody removed our directory: begin anew
            self._pending.release()
            added = self._pending.add(name, staged)
        try:
            yield
        except BaseException:
            if added:
                self._pending.remove(name)
            raise

    def _put(self, name: str, data: Buffer, *, durable: bool, around: _Around) -> None:
        with self._staged(name, data, durable) as staged, self._accounts.locked() as books:
            self._replace(books, name, staged, data, around)

    @contextlib.contextmanager
    def _staged(self, name: str, data: Buffer, durable: bool) -> Iterator[str]:
        size = memoryview(data).nbytes
        if size > self.max_bytes:
            raise self._no_space(name, f"{size} bytes are more than the {self.max_bytes} allowed")
        with (
            os_errors("put", self.url, name),
            self._directory.staged(name, data, durable=durable) as staged,
        ):
            yield staged

    def _replace(self, books: Books, name: str, staged: str, data: Buffer, around: _Around) -> None:
        """Move a staged file to its place, with room made for it."""
        size = memoryview(data).nbytes
        before = books.size_of(name)
        if not self._make_room(books, name, _growth(before, size)):
            raise self._no_space(
                name,
                f"{size} bytes do not fit: {books.bytes} of {self.max_bytes} bytes and "
                f"{books.files} of {self.max_files} files are taken and may not be evicted",
            )
        with around(name, staged), books.changing(name, before, size):
            _mark_used(staged)
            self._directory.rename(staged, name)

    def _no_space(self, name: str, problem: str) -> NoSpaceError:
        return NoSpaceError(problem, op="put", store=self.url, key=name)

    def delete(self, name: str) -> None:
        """Remove an object, if it is there."""
        with (
            os_errors("delete", self.url, name),
            self._accounts.locked() as books,
            books.changing(name, books.size_of(name), None),
        ):
            self._directory.delete(name)

    def quarantine(self, name: str) -> None:
        """Set a corrupt object aside, where a person can look at it; only the last few are kept."""
        with os_errors("quarantine", self.url, name), self._accounts.locked() as books:
            before = books.size_of(name)
            if before is None:
                return
            make_private(self._quarantine)
            aside = f"{time.time_ns():020d}-{quote(name, safe='')}"[:255]
            with books.changing(name, before, None):
                os.replace(self._directory.path(name), os.path.join(self._quarantine, aside))
            for old in sorted(os.listdir(self._quarantine))[:-_QUARANTINED_FILES]:
                os.unlink(os.path.join(self._quarantine, old))

    # -- what is still to upload

    def uploaded(self, name: str) -> None:
        """Forget that ``name`` is to be uploaded; from now on it may be evicted."""
        with os_errors("uploaded", self.url, name):
            self._pending.remove(name)

    def pending(self, prefix: str = "") -> list[str]:
        """Names that this process has recorded or adopted and not uploaded yet."""
        with os_errors("pending", self.url):
            return self._pending.mine(prefix)

    def adopt(self, prefix: str = "") -> list[str]:
        """Take over what processes that are gone have left to upload; returns the names.

        Of any number of processes that try at once, exactly one gets each name.
        """
        # With the accounts locked, for whoever is about to evict must not overlook a record that
        # is on its way from one owner to the other.
        with os_errors("adopt", self.url), self._accounts.locked():
            return self._pending.adopt(prefix)

    def close(self) -> None:
        """Let go of what is not uploaded, for another process to adopt; record nothing more."""
        self._pending.close()

    # -- bounds

    def trim(self) -> int:
        """Evict down to the low-water mark if above the high one; returns how many objects.

        For a background thread: the scan it takes then does not happen in a writer.
        """
        if not _above(self.usage(), self, _HIGH_WATER):
            return 0
        found = list(self.objects())
        removed = 0
        with os_errors("trim", self.url):
            with self._accounts.locked() as books:
                if self._is_off(books, found):  # files came or went by hand
                    found = books.count()
                victims = self._evictable(found) if _above(books.usage, self, _HIGH_WATER) else []
            while victims:
                # Not one long hold of the lock: writers get their turns in between.
                with self._accounts.locked() as books:
                    if not _above(books.usage, self, _LOW_WATER):
                        break
                    victim = victims.pop()
                    if not self._changed(victim):
                        self._evict(books, victim)
                        removed += 1
        return removed

    def _is_off(self, books: Books, found: list[ObjectInfo]) -> bool:
        off_bytes = abs(books.bytes - sum(info.size for info in found))
        off_files = abs(books.files - len(found))
        return off_bytes > _TOLERANCE * self.max_bytes or off_files > _TOLERANCE * self.max_files

    def _make_room(self, books: Books, name: str, growth: Usage) -> bool:
        """Evict until ``growth`` of object ``name`` fits; false if it cannot be made to."""
        chosen_now = False
        while not self._fits(books.usage, growth):
            if not self._victims:
                if not self._choose_victims(books, name, growth):
                    return False
                chosen_now = True
                continue  # files removed by hand may have left room
            victim = self._victims.pop()
            if chosen_now or not (victim.key == name or self._changed(victim)):
                self._evict(books, victim)
        return True

    def _choose_victims(self, books: Books, name: str, growth: Usage) -> bool:
        """Count anew and pick enough victims for ``growth`` to fit, and for some time to come.

        False, and none, if evicting everything that may go were not enough.
        """
        found = [info for info in books.count() if info.key != name]
        free = self._evictable(found)
        after = books.usage
        needed = 0
        while not self._fits(after, growth):
            needed += 1
            if needed > len(free):
                return False
            after = Usage(after.bytes - free[-needed].size, after.files - 1)
        batch = max(needed, len(free) // 10, _SCAN_YIELDS_AT_LEAST)
        self._victims = free[-batch:]
        return True

    def _fits(self, usage: Usage, growth: Usage) -> bool:
        return (
            usage.bytes + growth.bytes <= self.max_bytes
            and usage.files + growth.files <= self.max_files
        )

    def _evictable(self, found: list[ObjectInfo]) -> list[ObjectInfo]:
        """Those of the objects found that may go, least recently used last.

        Called with the accounts locked: no record moves from a dead owner to its heir meanwhile.
        What became pending after ``found`` was made has a later time than it says.
        """
        pinned = self._pending.everybodys()
        free = (info for info in found if info.key not in pinned)
        return sorted(free, key=lambda info: info.modified, reverse=True)

    def _changed(self, victim: ObjectInfo) -> bool:
        """Whether the victim was used, replaced or removed since it was chosen."""
        return self._directory.stat(victim.key) != victim

    def _evict(self, books: Books, victim: ObjectInfo) -> None:
        with books.changing(victim.key, victim.size, None):
            self._directory.delete(victim.key)


@contextlib.contextmanager
def _unrecorded(name: str, staged: str) -> Iterator[None]:
    yield


def _growth(before: int | None, size: int) -> Usage:
    return Usage(size, 1) if before is None else Usage(size - before, 0)


def _mark_used(path: str) -> None:
    # Not by leaving it to the kernel, whose clock for files ticks every few milliseconds.
    now = time.time_ns()
    os.utime(path, ns=(now, now))


def _above(usage: Usage, tier: LocalTier, fraction: float) -> bool:
    return usage.bytes > fraction * tier.max_bytes or usage.files > fraction * tier.max_files


def _tag_as_cache(root: str) -> None:
    with contextlib.suppress(FileExistsError):
        path = os.path.join(root, "CACHEDIR.TAG")
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, _CACHEDIR_TAG)
        finally:
            os.close(fd)
