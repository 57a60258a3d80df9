"""The disk tier: entries on this machine, and what is still to be uploaded of them.

Beside ``objects/`` and ``staging/`` (see :class:`~s3cache.store.ObjectFiles`), its root holds::

    usage               how much is in objects/            (s3cache.tier._bounds)
    usage.victims       what goes next                     (s3cache.tier._bounds)
    usage.search, .trim locked by whoever looks for them
    pending/<owner>/    what is not uploaded yet           (s3cache.tier._pending)
    quarantine/         the last few files found corrupt
    CACHEDIR.TAG        tells backup programs to leave all this out
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar, overload
from urllib.parse import quote

from s3cache import entries, frame
from s3cache._problems import Problems
from s3cache.errors import (
    ClosedError,
    CorruptError,
    NoSpaceError,
    PreconditionError,
    ReadOnlyError,
    S3CacheError,
    StoreError,
    UntrustedError,
)
from s3cache.frame import Frame, Judge
from s3cache.stats import Counters, Usage
from s3cache.store import (
    Admit,
    Buffer,
    Directory,
    NotAdmitted,
    ObjectFiles,
    ObjectInfo,
    PutMode,
    Staged,
    mark_used,
    os_errors,
)
from s3cache.tier._bounds import Books, Bounds
from s3cache.tier._pending import Pending
from s3cache.transfer import background

__all__ = ["DiskTier", "Found", "RestingDisk", "TierStore"]

#: Entered around the moment a staged file, the second argument, becomes the object.
_Around: TypeAlias = Callable[[str, Staged], AbstractContextManager[None]]

_T = TypeVar("_T")

_QUARANTINED_FILES = 8
# https://bford.info/cachedir/
_CACHEDIR_TAG = b"Signature: 8a477f597d28d172789f06886806bc55\n# Made by s3cache.\n"

# A disk that failed is left alone for so long: somebody may make room on it meanwhile.
_REST_S = 60.0


@dataclass(frozen=True)
class Found:
    """What a search came to.

    Attributes:
        name: of the object that was found; empty if there is none.
        data: its bytes, not verified.
        others: where none was found, what there is besides.
        judge: decides whose entry it is; it may have done so while the data were read.
    """

    name: str = ""
    data: bytes = b""
    others: tuple[ObjectInfo, ...] = ()
    judge: Judge | None = None


class DiskTier:
    """Objects on the local disk, at most ``max_bytes`` and ``max_files`` of them. Synchronous.

    Any number of threads and processes of one machine may use the same root at once. The bounds
    hold for the objects; each writer may have one more in staging. Objects that are recorded as
    pending are never evicted.

    Every method may raise :class:`~s3cache.errors.StoreError`.

    Args:
        namespace: keeps this tier's names apart from those of others in the same root, which share
            its bounds. Objects of different places need not be equally trusted.
        note: what each record made here says to whoever uploads the object.

    Raises:
        ConfigError: the root is not a private directory of this user.
        StoreError: it cannot be created or written.
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
        self._files = ObjectFiles(root)
        self.root = self._files.root
        self.url = self._files.url
        self._namespace = f"{namespace}/" if namespace else ""
        self._pending = Pending(
            os.path.join(self.root, "pending"),
            lambda make: self._files.directory("pending", make=make),
            note,
        )
        self._bounds = Bounds(
            self._files,
            max_bytes=max_bytes,
            max_files=max_files,
            pinned=self._pending.everybodys,
        )
        with contextlib.suppress(ReadOnlyError), os_errors("open", self.url):
            _tag_as_cache(self._files.directory())
            self._files.sweep()
        self.usage()  # counts what is there if nobody has yet; fails now if it cannot be kept

    def usage(self) -> Usage:
        """Bytes and files held, by all namespaces, exact at the moment of the call."""
        try:
            with os_errors("usage", self.url), self._bounds.locked() as books:
                return books.usage
        except ReadOnlyError:  # nobody keeps books there, and nobody changes it
            sizes = [info.size for info in self._files.walk()]
            return Usage(sum(sizes), len(sizes))

    def trim(self) -> int:
        """Evict down to the low-water mark if above the high one; returns how many objects.

        For a background thread: the scan it takes then does not happen in a writer.
        """
        with os_errors("trim", self.url):
            return self._bounds.trim()

    def is_trim_due(self) -> bool:
        """Whether a good part of a bound was written here since this was last true."""
        return self._bounds.is_trim_due()

    # -- reading

    def load(self, name: str) -> Frame | None:
        """The verified entry at ``name``, or ``None``; marks it as used just now.

        Raises:
            CorruptError: what is there is damaged, or belongs elsewhere.
        """
        data = self.get(name)
        return None if data is None else entries.verify(name, data)

    def search(
        self, names: Sequence[str], prefix: str, *, head: Callable[[bytes], None] | None = None
    ) -> Found:
        """The first of ``names`` that is there, marked as used, or what there is with ``prefix``.

        All in one, for whoever reads the disk through a thread. Nothing is verified.

        Args:
            head: is given the first bytes of a large object, while or before the rest is read.
        """
        for name in names:
            data = self._files.use(self._namespace + name, head)
            if data is not None:
                return Found(name, data)
        return Found(others=tuple(self.objects(prefix)))

    def get(self, name: str) -> bytes | None:
        """The object's bytes, or ``None``; marks it as used just now."""
        return self._files.use(self._namespace + name)

    def peek(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        """The object's bytes, or ``length`` of them, or ``None``; does not count as a use."""
        return self._files.read(self._namespace + name, start, length)

    def holds(self, name: str) -> bool:
        """Whether the object is there; does not count as a use."""
        return self._files.stat(self._namespace + name) is not None

    def objects(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All objects whose name starts with ``prefix``; ``modified`` is the time of last use."""
        for info in self._files.walk(self._namespace + prefix):
            yield ObjectInfo(info.key[len(self._namespace) :], info.size, info.modified)

    # -- writing

    def put(self, name: str, data: Buffer) -> None:
        """Write or replace an object, evicting the least recently used to make room.

        It survives this process but perhaps not a power failure, after which it is had again.

        Raises:
            NoSpaceError: it is larger than the tier, or what is there may not be evicted.
        """
        with self._staged(name, data, durable=False) as staged, self._room(name, data) as room:
            self._replace(*room, name, staged, data, _unrecorded)

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
        later: list[tuple[str, Buffer]] = []
        with os_errors("put", self.url), self._bounds.locked() as books:
            for name, data in objects:
                try:
                    with self._staged(name, data, durable=False) as staged:
                        key, size = self._namespace + name, memoryview(data).nbytes
                        has_room, before = self._bounds.room_at_hand(books, key, size)
                        if not has_room:
                            staged.remove()
                            later.append((name, data))
                            continue
                        self._replace(books, before, name, staged, data, _unrecorded)
                except StoreError as exc:
                    failed[name] = exc
        for name, data in later:
            try:
                self.put(name, data)
            except StoreError as exc:
                failed[name] = exc
        return failed

    def delete(self, name: str) -> None:
        """Remove an object, if it is there."""
        key = self._namespace + name
        with (
            os_errors("delete", self.url, key),
            self._bounds.locked() as books,
            books.changing(key, books.size_of(key), None),
        ):
            self._files.delete(key)

    def quarantine(self, name: str) -> None:
        """Set a corrupt object aside, where a person can look at it; only the last few are kept."""
        key = self._namespace + name
        with os_errors("quarantine", self.url, key), self._bounds.locked() as books:
            before = books.size_of(key)
            if before is None:
                return
            quarantine = self._files.directory("quarantine", make=True)
            aside = f"{time.time_ns():020d}-{quote(key, safe='')}"[:255]
            with books.changing(key, before, None):
                self._files.move(key, quarantine, aside)
            for old in sorted(quarantine.names())[:-_QUARANTINED_FILES]:
                os.unlink(old, dir_fd=quarantine.fd)

    @contextlib.contextmanager
    def _staged(self, name: str, data: Buffer, *, durable: bool) -> Iterator[Staged]:
        key, size = self._namespace + name, memoryview(data).nbytes
        if size > self._bounds.max_bytes:
            problem = f"{size} bytes are more than the {self._bounds.max_bytes} allowed"
            raise NoSpaceError(problem, op="put", store=self.url, key=key)
        with (
            os_errors("put", self.url, key),
            self._files.staged(key, data, durable=durable) as staged,
        ):
            yield staged

    def _room(
        self, name: str, data: Buffer
    ) -> contextlib.AbstractContextManager[tuple[Books, int | None]]:
        return self._bounds.room(self._namespace + name, memoryview(data).nbytes)

    def _replace(
        self,
        books: Books,
        before: int | None,
        name: str,
        staged: Staged,
        data: Buffer,
        around: _Around,
    ) -> None:
        """Move a staged file to its place, in which there are ``before`` bytes now."""
        key, size = self._namespace + name, memoryview(data).nbytes
        with around(key, staged), books.changing(key, before, size):
            mark_used(staged.fd)
            self._files.rename(staged, key)

    # -- what is still to upload

    def put_pending(self, name: str, data: Buffer) -> None:
        """Like :meth:`put`, for an object that nobody else has yet.

        When this returns, the bytes have reached the disk and are recorded as this process's to
        upload until :meth:`uploaded` is called. If the process ends before, exactly one other
        gets the record from :meth:`adopt`. A power failure may take object and record, but never
        leaves a part. Where this fails, an earlier record of the same name stays.
        """
        with self._staged(name, data, durable=True) as staged, self._room(name, data) as room:
            self._replace(*room, name, staged, data, self._recorded)

    @contextlib.contextmanager
    def _recorded(self, key: str, staged: Staged) -> Iterator[None]:
        """Record ``key`` as pending before the block; undo that if it fails.

        First the record: one without an object is dropped by whoever would upload it, but an
        object without a record would never be uploaded.
        """
        try:
            added = self._pending.add(key, staged)
        except FileNotFoundError:  # somebody removed our directory: begin anew
            self._pending.release()
            added = self._pending.add(key, staged)
        try:
            yield
        except BaseException:
            if added:
                self._pending.remove(key)
            raise

    def uploaded(self, name: str) -> None:
        """Forget that ``name`` is to be uploaded; from now on it may be evicted."""
        with os_errors("uploaded", self.url, name):
            self._pending.remove(self._namespace + name)

    def pending(self) -> list[str]:
        """Names that this process has recorded or adopted and not uploaded yet."""
        with os_errors("pending", self.url):
            return self._ours(self._pending.mine(self._namespace))

    def recorded(self) -> set[str]:
        """Names of this tier that any process, dead or alive, has recorded as to be uploaded."""
        with os_errors("recorded", self.url):
            return {*self._ours([*filter(self._is_ours, self._pending.everybodys())])}

    def adopt(self, limit: int | None = None, but: Collection[str] = ()) -> list[str]:
        """Take over what processes that are gone have left to upload; returns the names.

        Of any number of processes that try at once, exactly one gets each name.

        Args:
            limit: so many at most.
            but: names to leave to others.
        """
        # With the accounts locked, for whoever is about to evict must not overlook a record that
        # is on its way from one owner to the other.
        with os_errors("adopt", self.url), self._bounds.locked():
            keys = {self._namespace + name for name in but}
            return self._ours(self._pending.adopt(self._namespace, limit, keys))

    def give_back(self, name: str) -> None:
        """Leave what was adopted, or recorded here, for another process to adopt at once."""
        key = self._namespace + name
        with os_errors("give_back", self.url, key), self._bounds.locked():
            self._pending.give_back(key)

    def note(self, name: str) -> bytes | None:
        """What our record of the object says to whoever uploads it; ``None`` without a record."""
        with os_errors("note", self.url, name):
            return self._pending.note_of(self._namespace + name)

    def close(self, timeout_s: float | None = None) -> None:
        """Let go of what is not uploaded, for another process to adopt; record nothing more.

        Args:
            timeout_s: the longest to wait, for tiers that do not wait for a disk that hangs.
        """
        self._pending.close()

    def _is_ours(self, key: str) -> bool:
        return key.startswith(self._namespace)

    def _ours(self, keys: list[str]) -> list[str]:
        return [key[len(self._namespace) :] for key in keys]


class RestingDisk:
    """A disk tier that is left alone for a minute after it failed, and told of where errors end.

    Its methods act as if there were nothing on the disk, and no room for anything, where there is
    no tier or where it rests. What fails is not raised, unless the cache is strict.

    Args:
        admit: decides whose entries are used.
        ahead: whether that takes so long that it is better done while an entry is read.

    Attributes:
        tier: the tier itself, which raises what fails; ``None`` if there is none.
        error: why it could not be read or written the last time, if it could not.
    """

    def __init__(
        self,
        tier: DiskTier | None,
        counters: Counters,
        problems: Problems,
        admit: Judge | None = None,
        *,
        ahead: bool = False,
    ) -> None:
        self.tier = tier
        self._admit = admit
        self._ahead = ahead
        self._counters = counters
        self._problems = problems
        self._unread_until = 0.0
        self._unwritten_until = 0.0
        self.error: Exception | None = None

    @property
    def unread(self) -> Exception | None:
        """Why nothing is read for now, if reading failed just now."""
        return self.error if time.monotonic() < self._unread_until else None

    @property
    def readable(self) -> DiskTier | None:
        """The tier, unless reading it failed just now."""
        return self.tier if time.monotonic() >= self._unread_until else None

    @property
    def writable(self) -> DiskTier | None:
        """The tier, unless writing it failed just now."""
        return self.tier if time.monotonic() >= self._unwritten_until else None

    def load(self, name: str) -> Frame | None:
        """The verified entry at ``name``, or ``None``.

        Raises:
            CorruptError: the file is damaged; it was set aside.
        """
        data = self._read(lambda tier: tier.get(name), None)
        return None if data is None else self.verify(name, data)

    def verify(self, name: str, data: bytes, judge: Judge | None = None) -> Frame:
        """The entry that was read from ``name``.

        Args:
            judge: who has judged it ahead, where it was searched for.

        Raises:
            CorruptError: the file is damaged; it was set aside.
            UntrustedError: it is not admitted; it stays, for others may trust whose it is.
        """
        try:
            return entries.verify(name, data, admit=judge or self._admit)
        except CorruptError:
            if self.tier is not None:
                self._quarantine(self.tier, name)
            raise

    def search(self, key: str, names: Sequence[str]) -> Found:
        """The first of ``names`` that is there, or what there is of ``key``, the last used first.

        Not verified: see :meth:`verify`.
        """
        prefix = entries.name_prefix(key)
        ahead = _Ahead(self._admit) if self._ahead and self._admit is not None else None
        head = None if ahead is None else ahead.look
        found = self._read(lambda tier: tier.search(names, prefix, head=head), Found())
        if found.others:
            return replace(found, others=_last_used_first(found.others))
        return found if ahead is None else replace(found, judge=ahead)

    def names(self, key: str) -> list[str]:
        """Names of all entries under ``key``, the last used first."""
        prefix = entries.name_prefix(key)
        present = self._read(lambda tier: (*tier.objects(prefix),), tuple[ObjectInfo, ...]())
        return [info.key for info in _last_used_first(present)]

    def holds(self, name: str) -> bool:
        """Whether there is something at ``name``; it is not looked at."""
        return self._read(lambda tier: tier.holds(name), False)

    def usage(self) -> Usage | None:
        """Bytes and files held, by all namespaces; ``None`` without a tier."""
        return self._read(lambda tier: tier.usage(), None)

    def _read(self, read: Callable[[DiskTier], _T], otherwise: _T) -> _T:
        """What ``read`` gives; ``otherwise`` without a tier, and where the disk fails."""
        tier = self.readable
        if tier is None:
            return otherwise
        try:
            return read(tier)
        except CorruptError:
            raise
        except S3CacheError as exc:
            self.error = exc
            self._unread_until = self._unwritten_until = time.monotonic() + _REST_S
            self._problems.met("local", "the local tier fails and is not used for now", exc)
            return otherwise

    def set_aside(self, entry: Frame) -> None:
        """Put every copy of an entry that was loaded from here where nobody looks it up."""
        tier = self.readable
        for name in entries.names_of(entry.header):
            with contextlib.suppress(CorruptError, UntrustedError):
                there = self.load(name)
                if tier is not None and there is not None and there.digest == entry.digest:
                    self._quarantine(tier, name)

    def keep(self, objects: Sequence[tuple[str, Buffer]]) -> None:
        """Write what came from the remote, if the tier takes it."""
        tier = self.writable
        if tier is None or not objects:
            return
        try:
            failed = tier.put_all(objects)
        except S3CacheError as exc:
            self.write_failed(exc)
            return
        for name, _ in objects:
            if (error := failed.get(name)) is None:
                self.wrote(tier)
            else:
                self.write_failed(error)

    def remove(self, name: str) -> bool:
        """Remove what is at ``name``, and what record of it is ours; false if nothing was there.

        Raises:
            StoreError: the disk fails.
        """
        tier = self.writable
        if tier is None or not tier.holds(name):
            return False
        tier.uploaded(name)
        tier.delete(name)
        return True

    def wrote(self, tier: DiskTier) -> None:
        """Something was written to the tier; it is trimmed in the background from time to time."""
        self.error = None
        if tier.is_trim_due():
            with contextlib.suppress(ClosedError):  # the interpreter is exiting
                background().submit(asyncio.to_thread(self._trim, tier))

    def write_failed(self, error: S3CacheError) -> None:
        """Write nothing for a while; what is there can still be read."""
        self.error = error
        if isinstance(error, NoSpaceError) and error.__cause__ is None:
            # Within its bounds, not for want of disk: the next entry may fit.
            self._problems.met("bound", "the local tier is too small for this entry", error)
            return
        self._unwritten_until = time.monotonic() + _REST_S
        self._problems.met("local", "the local tier cannot be written and is left as it is", error)

    def _quarantine(self, tier: DiskTier, name: str) -> None:
        self._counters.set_aside("local")
        try:
            tier.quarantine(name)
        except S3CacheError as exc:
            self.write_failed(exc)

    def _trim(self, tier: DiskTier) -> None:
        try:
            tier.trim()
        except Exception as exc:  # noqa: BLE001 - whatever it is, it can be tried again
            self._problems.warn("local", "the local tier cannot be trimmed", exc)


class _Ahead:
    """Judges whose an entry is while the rest of it is read, for the time that a proof takes.

    Called, it judges what was read: anew, unless that is what was admitted ahead to the last byte.
    """

    def __init__(self, admit: Judge) -> None:
        self._admit = admit
        self._admitted: tuple[bytes, bytes] | None = None

    def look(self, first_bytes: bytes) -> None:
        """Judge by the first bytes; what is not admitted waits until all of it is there."""
        with contextlib.suppress(Exception):
            frame.judge(first_bytes, self._note)

    def _note(self, digest: bytes, signatures: bytes) -> None:
        self._admit(digest, signatures)
        self._admitted = digest, signatures

    def __call__(self, digest: bytes, signatures: bytes) -> None:
        if self._admitted != (digest, signatures):
            self._admit(digest, signatures)


def _last_used_first(present: tuple[ObjectInfo, ...]) -> tuple[ObjectInfo, ...]:
    return tuple(sorted(present, key=lambda info: info.modified, reverse=True))


@contextlib.contextmanager
def _unrecorded(key: str, staged: Staged) -> Iterator[None]:
    yield


def _tag_as_cache(root: Directory) -> None:
    with contextlib.suppress(FileExistsError):
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open("CACHEDIR.TAG", flags, 0o600, dir_fd=root.fd)
        try:
            os.write(fd, _CACHEDIR_TAG)
        finally:
            os.close(fd)


class TierStore:
    """A :class:`~s3cache.store.Store` of what a tier holds, and its accounts stay right.

    Closing it closes the tier. What is read here does not count as used. What is removed is not
    uploaded any more.
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
        """Return the names that are still to be uploaded."""
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
