"""Bounds on a directory that many processes change: exact accounts, and LRU eviction when full.

The file ``usage`` holds one record of :data:`_RECORD` layout (little-endian)::

    magic[8]  bytes:i64  files:i64  old_size:i64  name_len:u16  crc32:u32  name[name_len]

``name`` is empty, or names the object that is being changed, with ``old_size`` its size before
(-1: it was not there). To settle is to look at what is there now, book the difference, and clear
the name. A writer settles after its change; if it was killed, the next process that takes the lock
does.

An object's modification time is its last use. Up to a thousand objects are evicted in exactly that
order: one scan finds the oldest tenth, which serves as many evictions. With more, a writer that
needs room draws a thousand at random and evicts from their oldest tenth. Trimming in the background
looks at all of them, so that writers seldom have to. No process scans with the lock held, unless
the books prove wrong.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from s3cache._forks import call_in_child, close_unshared
from s3cache.errors import NoSpaceError, TransientError
from s3cache.stats import Usage
from s3cache.store import ObjectFiles, ObjectInfo

__all__ = ["Accounts", "Books", "Bounds"]

_RECORD = struct.Struct("<8sqqqHI")
_MAGIC = b"s3cuse1\n"
_MAX_RECORD = 2048
_ABSENT = -1
_NAME = "usage"
_CANDIDATES = "usage.next"
_MAX_CANDIDATE = 8_192  # bytes of a line: a name has 900 at most, each six in JSON at most
LOCK_TIMEOUT_S = 4.0

# Trimming starts above the first fraction of a bound and ends at the second, so that a writer
# seldom has to make room itself.
_HIGH_WATER = 0.95
_LOW_WATER = 0.90
_SCAN_YIELDS_AT_LEAST = 64
# Trimming is due after this part of a bound has been written.
_TRIM_EVERY = 0.02
# A trim recounts if what it found differs from the books by this fraction of a bound.
_TOLERANCE = 0.05
# A writer without room looks at so many objects, and evicts the oldest tenth of them, one by one:
# to look at 50,000 took a second.
_SAMPLE = 1_024
# Others wait for that search, so long at a time, and in all.
_SEARCH_S = 0.005
_SEARCH_AT_MOST_S = 0.5
# A trim pauses after each object, so that others get the lock.
_TRIM_PAUSE_S = 0.0005
# At most this part of a sample is evicted, as the rest is not old.
_OLD_PART = 4


class Accounts:
    """The accounts of one directory."""

    def __init__(self, files: ObjectFiles) -> None:
        self._files = files
        self._path = os.path.join(files.root, _NAME)
        # Threads of one process queue up here, where waiting costs nothing: for the file's lock one
        # has to ask again and again.
        self._mutex = threading.Lock()
        call_in_child(self._forget)

    @contextlib.contextmanager
    def locked(self) -> Iterator[Books]:
        """Lock the accounts, and give the settled books.

        Raises:
            TransientError: another thread or process held the lock for :data:`LOCK_TIMEOUT_S`.
            OSError: the file cannot be opened or written.
        """
        mutex = self._mutex  # a child forked in the block has another one
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        if not mutex.acquire(timeout=LOCK_TIMEOUT_S):
            raise self._busy("another thread")
        try:
            with self._file_locked(deadline) as books:
                yield books
        finally:
            mutex.release()

    @contextlib.contextmanager
    def try_exclusive(self, task: str) -> Iterator[bool]:
        """Return whether this process alone does ``task``, until the end of the block."""
        fd = self._open(f"{_NAME}.{task}")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            chosen = False
        except OSError:  # no locks here: then several may
            chosen = True
        else:
            chosen = True
        try:
            yield chosen
        finally:
            close_unshared(fd)

    def _forget(self) -> None:
        # A thread of the parent may hold the lock.
        self._mutex = threading.Lock()

    @contextlib.contextmanager
    def _file_locked(self, deadline: float) -> Iterator[Books]:
        fd = self._open_locked(deadline)
        try:
            books = Books(self._files, fd)
            books.load()
            yield books
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)
            close_unshared(fd)

    def _open_locked(self, deadline: float) -> int:
        while True:
            fd = self._open()
            try:
                self._lock(fd, deadline)
                if os.fstat(fd).st_nlink:
                    return fd
            except BaseException:
                close_unshared(fd)
                raise
            close_unshared(fd)  # removed while we waited: others use a new one

    def _open(self, name: str = _NAME) -> int:
        flags = os.O_RDWR | os.O_CREAT
        try:
            return self._files.directory().open_private(name, flags)
        except FileNotFoundError:  # the root was removed: make it again
            self._files.ensure()
            return self._files.directory().open_private(name, flags)

    def _lock(self, fd: int, deadline: float) -> None:
        pause_s = 0.0001
        while True:
            try:
                return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise self._busy("another process") from None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.005)

    def _busy(self, who: str) -> TransientError:
        return TransientError(
            f"{who} has held {self._path} for {LOCK_TIMEOUT_S:g} s",
            op="lock",
            store=self._files.url,
        )


class Books:
    """Bytes and files held, while the lock is; every change goes through :meth:`changing`."""

    def __init__(self, files: ObjectFiles, fd: int) -> None:
        self._files = files
        self._fd = fd
        self.bytes = 0
        self.files = 0

    @property
    def usage(self) -> Usage:
        return Usage(self.bytes, self.files)

    def load(self) -> None:
        """Read the record and settle what a killed writer left; recount if there is none."""
        record = _parse(os.pread(self._fd, _MAX_RECORD, 0))
        if record is None:
            self.count()
            return
        self.bytes, self.files, name, before = record
        if name:
            self._settle(name, before, self.size_of(name))

    def count(self) -> list[ObjectInfo]:
        """Book what is there now, in place of what was booked; return it."""
        infos = list(self._files.walk())
        self.bytes, self.files = sum(info.size for info in infos), len(infos)
        self._store("", None)
        return infos

    @contextlib.contextmanager
    def changing(self, name: str, before: int | None, after: int | None) -> Iterator[None]:
        """Announce that the block changes the size of object ``name``, and book it.

        ``None`` is the size of an object that is not there. Where the block fails, what it did is
        looked up and booked.
        """
        self._store(name, before)
        try:
            yield
        except BaseException:
            self._settle(name, before, self.size_of(name))
            raise
        self._settle(name, before, after)

    def size_of(self, name: str) -> int | None:
        """Return the size of object ``name``, or ``None`` if it is not there."""
        info = self._files.stat(name)
        return None if info is None else info.size

    def _settle(self, name: str, before: int | None, after: int | None) -> None:
        self.bytes += (after or 0) - (before or 0)
        self.files += (after is not None) - (before is not None)
        self._store("", None)

    def _store(self, name: str, before: int | None) -> None:
        text = name.encode()
        fields = (self.bytes, self.files, _ABSENT if before is None else before, len(text))
        crc = zlib.crc32(repr(fields).encode() + text)
        os.pwrite(self._fd, _RECORD.pack(_MAGIC, *fields, crc) + text, 0)


@dataclass(frozen=True)
class _Sample:
    objects: list[ObjectInfo]
    is_all: bool

    @property
    def usage(self) -> Usage:
        return Usage(sum(info.size for info in self.objects), len(self.objects))


class Bounds:
    """At most ``max_bytes`` and ``max_files`` of objects; the least recently used go first.

    Any number of threads and processes may have bounds on one directory.

    Args:
        pinned: gives the names of objects that must not go; called with the accounts locked.
    """

    def __init__(
        self,
        files: ObjectFiles,
        *,
        max_bytes: int,
        max_files: int,
        pinned: Callable[[], set[str]],
    ) -> None:
        self.max_bytes = max_bytes
        self.max_files = max_files
        self._files = files
        self._pinned = pinned
        self._accounts = Accounts(files)
        self._candidates = _Candidates(files)
        # Touched only with the accounts locked.
        self._written = Usage(0, 0)  # in this process, since a trim was due
        self._searched = False  # ... and whether a search was needed for candidates

    def locked(self) -> contextlib.AbstractContextManager[Books]:
        """The settled books; see :meth:`Accounts.locked`."""
        return self._accounts.locked()

    @contextlib.contextmanager
    def reserve(self, name: str, size: int) -> Iterator[tuple[Books, int | None]]:
        """Make room for object ``name``; give the locked books, and the bytes it has now.

        What to evict is looked for without the lock.

        Raises:
            NoSpaceError: it does not fit even if everything that may go is evicted.
        """
        wanted = _SAMPLE
        sample: _Sample | None = None
        waits_until = time.monotonic() + _SEARCH_AT_MOST_S
        while True:
            with self.locked() as books:
                has_room = self.has_room(books, name, size)
                if sample is not None and not has_room:
                    if self._choose_candidates(books, sample, name, size):
                        has_room = self.has_room(books, name, size)
                    else:
                        wanted *= 8
                if has_room:
                    yield books, self._book_written(books, name, size)
                    return
            self._searched = True
            with self._accounts.try_exclusive("search") as chosen:
                searches = chosen or time.monotonic() > waits_until  # the other may be stopped
                sample = _Sample(*self._files.sample(wanted)) if searches else None
            if sample is None:  # another process searches, for all
                time.sleep(_SEARCH_S)

    def try_reserve(self, books: Books, name: str, size: int) -> tuple[bool, int | None]:
        """Do as :meth:`reserve`, if that takes no search; return whether there is room."""
        if not self.has_room(books, name, size):
            return False, None
        return True, self._book_written(books, name, size)

    def has_room(self, books: Books, name: str, size: int) -> bool:
        """Evict what was chosen until object ``name`` fits; return False if more must be chosen."""
        growth = self._growth(books, name, size)
        while not self._fits(books.usage, growth):
            candidate = self._candidates.pop()
            if candidate is None:
                return False
            if candidate.key != name and not self._has_changed(candidate):
                self._evict(books, candidate)
        return True

    def _book_written(self, books: Books, name: str, size: int) -> int | None:
        self._written = Usage(self._written.bytes + size, self._written.files + 1)
        return books.size_of(name)

    def _growth(self, books: Books, name: str, size: int) -> Usage:
        before = books.size_of(name)
        return Usage(size, 1) if before is None else Usage(size - before, 0)

    def is_trim_due(self) -> bool:
        """Return whether much was written here since this was last true, or a writer had to search.

        A trim in time spares writers the search.
        """
        due = self._searched or self._is_above(self._written, _TRIM_EVERY)
        if due:
            self._written, self._searched = Usage(0, 0), False
        return due

    def trim(self) -> int:
        """Evict down to the low-water mark if above the high one; return how many objects.

        For a background thread: the scan it takes then does not happen in a writer. Of several
        processes that would, one does.
        """
        with self.locked() as books:
            if not self._is_above(books.usage, _HIGH_WATER):
                return 0
        with self._accounts.try_exclusive("trim") as chosen:
            return self._trim() if chosen else 0

    def _trim(self) -> int:
        present = sorted(self._files.walk(), key=_last_use, reverse=True)
        removed = 0
        with self.locked() as books:
            if self._is_off(books, present):  # files came or went by hand
                present = sorted(books.count(), key=_last_use, reverse=True)
            above = self._is_above(books.usage, _HIGH_WATER)
            candidates = self._evictable(present) if above else []
        while candidates:
            # Release the lock after each object: writers get it in between.
            with self.locked() as books:
                if not self._is_above(books.usage, _LOW_WATER):
                    break
                candidate = candidates.pop()
                if not self._has_changed(candidate):
                    self._evict(books, candidate)
                    removed += 1
            time.sleep(_TRIM_PAUSE_S)
        return removed

    def _choose_candidates(self, books: Books, sample: _Sample, name: str, size: int) -> bool:
        """Pick enough candidates for object ``name`` to fit, and for some time to come.

        Return False, and pick none, where the sample is too small to find what is old.

        Raises:
            NoSpaceError: it does not fit even if everything that may go is evicted.
        """
        present = sample.objects
        if sample.is_all and sample.usage != books.usage:
            # Few as they are, or files came or went by hand: what is on the disk counts.
            present = books.count()
        free = self._evictable(
            sorted((info for info in present if info.key != name), key=_last_use, reverse=True)
        )
        growth, after = self._growth(books, name, size), books.usage
        needed = 0
        while not self._fits(after, growth):
            needed += 1
            if needed > len(free):
                break
            after = Usage(after.bytes - free[-needed].size, after.files - 1)
        if sample.is_all:
            if needed > len(free):
                raise self._no_space(books, name, size)
            batch = max(needed, len(free) // 10, _SCAN_YIELDS_AT_LEAST)
        else:
            if needed > len(free) // _OLD_PART:
                return False
            batch = max(needed, len(free) // 10)
        self._candidates.replace(free[-batch:])
        return True

    def _no_space(self, books: Books, name: str, size: int) -> NoSpaceError:
        return NoSpaceError(
            f"{size} bytes do not fit: {books.bytes} of {self.max_bytes} bytes and "
            f"{books.files} of {self.max_files} files are taken and may not be evicted",
            op="put",
            store=self._files.url,
            key=name,
        )

    def _evictable(self, present: list[ObjectInfo]) -> list[ObjectInfo]:
        """Return which of the objects present may be evicted, in the same order.

        With the accounts locked no record of what is pinned moves from one owner to another. What
        was pinned after ``present`` was made has a later time than it says.
        """
        pinned = self._pinned()
        return [info for info in present if info.key not in pinned]

    def _evict(self, books: Books, candidate: ObjectInfo) -> None:
        with books.changing(candidate.key, candidate.size, None):
            self._files.delete(candidate.key)

    def _has_changed(self, candidate: ObjectInfo) -> bool:
        """Whether the candidate was used, replaced or removed since it was chosen."""
        return self._files.stat(candidate.key) != candidate

    def _fits(self, usage: Usage, growth: Usage) -> bool:
        return (
            usage.bytes + growth.bytes <= self.max_bytes
            and usage.files + growth.files <= self.max_files
        )

    def _is_above(self, usage: Usage, fraction: float) -> bool:
        return usage.bytes > fraction * self.max_bytes or usage.files > fraction * self.max_files

    def _is_off(self, books: Books, present: list[ObjectInfo]) -> bool:
        off_bytes = abs(books.bytes - sum(info.size for info in present))
        off_files = abs(books.files - len(present))
        return off_bytes > _TOLERANCE * self.max_bytes or off_files > _TOLERANCE * self.max_files


def _last_use(info: ObjectInfo) -> float:
    return info.modified


def _parse(data: bytes) -> tuple[int, int, str, int | None] | None:
    """(bytes, files, name, size before); ``None`` for a record that is absent, torn or absurd."""
    if len(data) < _RECORD.size:
        return None
    magic, size, files, before, name_len, crc = _RECORD.unpack_from(data)
    text = data[_RECORD.size : _RECORD.size + name_len]
    fields = (size, files, before, name_len)
    if magic != _MAGIC or crc != zlib.crc32(repr(fields).encode() + text):
        return None
    if size < 0 or files < 0:  # more went than was booked: somebody added files by hand
        return None
    return size, files, text.decode(), None if before == _ABSENT else before


class _Candidates:
    """The objects to evict next, for all processes that share a directory: one search serves all.

    The file ``usage.next`` has a line for each, the next one last::

        ["name", bytes, time of last use]

    It is a hint: what has changed since stays. A file that cannot be understood is as good as none.
    Used with the accounts locked only.
    """

    def __init__(self, files: ObjectFiles) -> None:
        self._files = files
        self._unwritten: list[ObjectInfo] = []  # where the disk took no list

    def replace(self, infos: list[ObjectInfo]) -> None:
        """Have the last of ``infos`` go first."""
        lines = (json.dumps([info.key, info.size, info.modified]) + "\n" for info in infos)
        self._unwritten = []
        try:
            fd = self._open(os.O_WRONLY | os.O_CREAT)
            try:
                os.ftruncate(fd, 0)
                data = memoryview("".join(lines).encode())
                while data:
                    data = data[os.write(fd, data) :]
            finally:
                close_unshared(fd)
        except OSError:  # a full disk, which is to get emptier now
            self._unwritten = infos
            with contextlib.suppress(OSError):
                root = self._files.directory()
                os.unlink(_CANDIDATES, dir_fd=root.fd)

    def pop(self) -> ObjectInfo | None:
        """The next one, which is taken off the list; ``None`` at its end."""
        if self._unwritten:
            return self._unwritten.pop()
        try:
            fd = self._open(os.O_RDWR)
        except FileNotFoundError:
            return None
        try:
            end = os.fstat(fd).st_size
            start = max(end - _MAX_CANDIDATE, 0)
            tail = os.pread(fd, end - start, start)
            line_at = tail.rfind(b"\n", 0, -1) + 1
            info = _parse_candidate(tail[line_at:])
            os.ftruncate(fd, start + line_at if info else 0)
            return info
        finally:
            close_unshared(fd)

    def _open(self, flags: int) -> int:
        return self._files.directory().open_private(_CANDIDATES, flags)


def _parse_candidate(line: bytes) -> ObjectInfo | None:
    if line[-1:] != b"\n":  # cut off where its writer was killed, or the end of the list
        return None
    try:
        name, size, modified = json.loads(line)
    except ValueError:
        return None
    if not (isinstance(name, str) and isinstance(size, int) and isinstance(modified, float)):
        return None
    return ObjectInfo(name, size, modified)
