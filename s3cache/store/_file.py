"""Objects as files below one private directory, and the store that is made of them.

Layout, every name below ``root``::

    objects/<segment>+/.../<segment>    one file an object; "/" in a key makes a directory
    staging/<random>                    being written; renamed into objects/ when complete

A segment keeps ``a-z 0-9 _ . = -`` and percent-encodes every other byte of its UTF-8, capitals
too: two keys stay two files where the file system folds case. A directory's name ends in ``+``, so
a key may be a prefix of another. A segment longer than a file name may be is cut into pieces: each
but the last is a directory that ends in ``~``, each but the first begins with ``~``. No name begins
with a dot: what does is not ours (NFS puts ``.nfs...`` where an open file is deleted).

Writers never touch a visible file: they stage, flush and rename, so a reader in any process sees
whole objects only. A staged file is locked (``flock``) while its writer lives; one that is neither
locked nor young was left by a killed writer and is swept.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import random
import re
import secrets
import stat
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TypeAlias, TypeVar, overload
from urllib.parse import quote, unquote

from s3cache.errors import ConfigError, PreconditionError, ReadOnlyError
from s3cache.store._base import (
    MAX_KEY_BYTES,
    Admit,
    Buffer,
    NotAdmitted,
    ObjectInfo,
    PutMode,
    check_key,
    check_range,
    is_key,
    os_errors,
)
from s3cache.store._deadline import DeadlineExecutor
from s3cache.store._directory import Directory, make_parents

__all__ = ["FileStore", "ObjectFiles", "Staged", "mark_used"]

_T = TypeVar("_T")
_Names: TypeAlias = tuple[str, ...]

_OBJECTS: _Names = ("objects",)
_STAGING: _Names = ("staging",)
# Directories above those of objects stay open: so deep below the root, and so many.
_HELD_DEPTH = 4
_HELD_AT_MOST = 16

_PLAIN = re.compile(r"[a-z0-9_=-][a-z0-9_.=-]*")
_MUST_ESCAPE = re.compile(r"[^a-z0-9_.=-]")
PIECE_BYTES = 200  # file names may have 255 bytes; the rest is room for the suffix

# A directory elsewhere is given so many times as long as one on this machine, and a second more for
# so many bytes.
_TIMES = 3
_BYTES_A_SECOND = 8 << 20
_LONGEST_S = 600.0

# A writer locks its staged file right after creating it; the sweep leaves it that long to do so.
_SWEEP_GRACE_S = 60.0

# What takes long to read, as long as it takes to look at what it begins with.
_LARGE_BYTES = 256 << 10
_HEAD_BYTES = 16 << 10

# Of one directory, so many objects are looked at before others get their turn.
_SAMPLED_TOGETHER = 128
# ... of so many directories that are open at once: a process may open a thousand files.
_OPEN_AT_MOST = 32


class ObjectFiles:
    """Objects as files. Synchronous; any number of threads and processes may share ``root``.

    What a store on a directory and the disk tier have in common. It bounds and evicts nothing.

    Args:
        root: created with mode 0700 (parents with 0755 at most) unless it exists.

    Raises:
        ConfigError: ``root``, or what belongs in it, is a symbolic link, no directory, another
            user's, or writable by group or others; or anybody may rename what is in a directory
            above it. Whoever can write there can run code in every reader.
        StoreError: it cannot be created.
    """

    def __init__(self, root: str | os.PathLike[str], *, create: bool = True) -> None:
        self.root = os.path.abspath(os.fspath(root))
        self.url = f"file://{quote(self.root)}"
        # By their names below the root, that of the root itself being empty.
        self._held: dict[_Names, Directory] = {}
        with os_errors("open", self.url):
            if create:
                self.ensure()
            else:
                self._held[()] = Directory.at(self.root)

    def ensure(self) -> None:
        """Make the root and what belongs in it, as far as it is missing; check that it is ours."""
        make_parents(self.root)
        for inside in (_OBJECTS, _STAGING):
            self._enter(inside, make=True)

    def directory(self, name: str = "", *, make: bool = False) -> Directory:
        """The root, or a directory in it, to work in by its descriptor.

        Raises:
            FileNotFoundError: it is missing, and ``make`` does not say to make it.
            ConfigError: it is not ours alone.
        """
        names = (name,) if name else ()
        self._forget_removed()
        return self._enter(names, make=make)

    def _enter(self, names: _Names, *, make: bool = False) -> Directory:
        if (held := self._held.get(names)) is not None:
            return held
        if not names:
            if make:
                make_parents(self.root)
            directory = Directory.at(self.root, make=make)
        else:
            directory = self._enter(names[:-1], make=make).enter(names[-1], make=make)
        # Those that hold objects are many, those above them few.
        if len(names) < _HELD_DEPTH and len(self._held) < _HELD_AT_MOST:
            self._held[names] = directory
        return directory

    def _forget_removed(self) -> bool:
        """Whether a directory that is held was removed under us; it is looked for again then."""
        removed = [names for names, held in [*self._held.items()] if held.is_removed()]
        for names in removed:
            self._held.pop(names, None)
        if () in removed:
            self._held.clear()
        return bool(removed)

    def _at(self, names: _Names, act: Callable[[Directory, str], _T]) -> _T:
        """What ``act`` gives for the directory and the name of a file."""
        try:
            return act(self._enter(names[:-1]), names[-1])
        except FileNotFoundError:
            if not self._forget_removed():
                raise
        return act(self._enter(names[:-1]), names[-1])

    # -- reading

    def path(self, key: str) -> str:
        """The file that holds (or would hold) ``key``."""
        return os.path.join(self.root, *_names(key))

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes | None:
        """The object's bytes, or ``length`` of them from ``start``; ``None`` where absent."""
        if length is not None:
            check_range(start, length)
        with self._opened(key) as (fd, size):
            if fd is None:
                return None
            left = max(size - start, 0)
            return _read_exactly(fd, left if length is None else min(length, left), start)

    def read_if(self, key: str, at_most: int) -> bytes | NotAdmitted | None:
        """The object's bytes if they are no more than ``at_most``; ``None`` where absent."""
        with self._opened(key) as (fd, size):
            if fd is None:
                return None
            return NotAdmitted(size) if size > at_most else _read_exactly(fd, size, 0)

    def use(self, key: str, head: Callable[[bytes], None] | None = None) -> bytes | None:
        """Like :meth:`read`, and marks the object as used just now.

        Args:
            head: is given the first bytes of a large object, before all of it is read.
        """
        with self._opened(key) as (fd, size):
            if fd is None:
                return None
            if head is not None and size >= _LARGE_BYTES:
                head(os.pread(fd, _HEAD_BYTES, 0))
            data = _read_exactly(fd, size, 0)
            # On a disk that became read-only the bytes are good all the same.
            with contextlib.suppress(OSError):
                mark_used(fd)
            return data

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[tuple[int | None, int]]:
        """A descriptor of the object's file, and its size; no descriptor where there is none."""
        check_key(key)
        with os_errors("get", self.url, key):
            try:
                fd = self._at(_names(key), _open_to_read)
            except (FileNotFoundError, NotADirectoryError):
                yield None, 0
                return
            try:
                status = os.fstat(fd)
                if _is_object(status):
                    yield fd, status.st_size
                else:
                    yield None, 0
            finally:
                os.close(fd)

    def stat(self, key: str) -> ObjectInfo | None:
        """The object's size and time of last change, or ``None`` where absent."""
        check_key(key)
        with os_errors("head", self.url, key):
            try:
                status = self._at(_names(key), _stat)
            except (FileNotFoundError, NotADirectoryError):
                return None
        return ObjectInfo(key, status.st_size, status.st_mtime) if _is_object(status) else None

    def walk(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object whose key starts with ``prefix``; those deleted meanwhile may be missing.

        Costs one directory scan per directory that can hold such keys. What is not at the place
        of a key is none of ours and is passed over: it could be neither read nor deleted.
        """
        if len(prefix) > MAX_KEY_BYTES:
            return
        *parents, last = map(_escape, prefix.split("/"))
        parts = [part for segment in parents for part in _parts(segment, "+")]
        done = "".join(f"{segment}/" for segment in parents)
        with os_errors("list", self.url, prefix), _absent_is_fine():
            self._forget_removed()
            directory = self._enter((*_OBJECTS, *parts))
            for names, info in _walk(directory, (*_OBJECTS, *parts), done, done + last):
                if is_key(info.key) and _names(info.key) == names:
                    yield info

    def sample(self, at_least: int) -> tuple[list[ObjectInfo], bool]:
        """Some of the objects, drawn at random by directories, and whether these are all.

        Costs as much as there are objects in it, and not as much as there are in all.
        """
        found: list[ObjectInfo] = []
        chance = random.Random()  # noqa: S311 - of its own: programs count on what theirs draws
        with os_errors("list", self.url), _absent_is_fine():
            self._forget_removed()
            directory = self._enter(_OBJECTS)
            for batch in _in_any_order(directory, _OBJECTS, "", chance):
                found += (
                    info for names, info in batch if is_key(info.key) and _names(info.key) == names
                )
                if len(found) >= at_least:
                    return found, False
        return found, True

    # -- writing

    def write(self, key: str, data: Buffer) -> None:
        """Write or replace the object, atomically; bytes and name have reached the disk then."""
        with self.staged(key, data, durable=True) as staged:
            self._flush_name(key, made=self._into_place(staged.replace, key))

    def create(self, key: str, data: Buffer) -> None:
        """Write the object durably unless it exists; exactly one of several creators wins.

        Raises:
            PreconditionError: the object exists; it was left alone.
        """
        with self.staged(key, data, durable=True) as staged:
            try:
                # Unlike rename, link refuses an existing name, on NFS too.
                made = self._into_place(staged.link, key)
            except FileExistsError:
                raise PreconditionError(
                    "already exists", op="put", store=self.url, key=key
                ) from None
            staged.remove()
            self._flush_name(key, made=made)

    def delete(self, key: str) -> None:
        """Remove the object, if there is one."""
        check_key(key)
        with os_errors("delete", self.url, key), _absent_is_fine():
            self._at(_names(key), lambda directory, name: os.unlink(name, dir_fd=directory.fd))

    def move(self, key: str, target: Directory, name: str) -> None:
        """Move the object to another directory, in which it is called ``name``."""
        self._at(
            _names(key),
            lambda directory, file: os.replace(
                file, name, src_dir_fd=directory.fd, dst_dir_fd=target.fd
            ),
        )

    @contextlib.contextmanager
    def staged(self, key: str, data: Buffer, *, durable: bool) -> Iterator[Staged]:
        """Write ``data`` to a staged file, for the block to move or remove.

        With ``durable`` the bytes have reached the disk. If the block fails nothing is left.
        """
        check_key(key)
        with os_errors("put", self.url, key):
            try:
                staged = self._open_staged()
            except FileNotFoundError:  # the root was removed: make it again
                self._forget_removed()
                self.ensure()
                staged = self._open_staged()
            try:
                _write_all(staged.fd, data)
                if durable:
                    _flush_data(staged.fd)
                yield staged
            except BaseException:
                with contextlib.suppress(OSError):  # moved, or left to the sweep
                    staged.remove()
                raise
            finally:
                os.close(staged.fd)

    def _open_staged(self) -> Staged:
        """A new file in staging, locked so that no sweep takes it as long as we live."""
        directory = self._enter(_STAGING)
        while True:
            name = secrets.token_hex(8)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            fd = os.open(name, flags, 0o600, dir_fd=directory.fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(fd).st_nlink:
                    return Staged(directory, name, fd)
            except BlockingIOError:
                pass
            except OSError:  # some network mounts have no locks, and no sweep either
                return Staged(directory, name, fd)
            # Stopped between the two calls for so long that a sweep took the file: another one.
            os.close(fd)

    def rename(self, staged: Staged, key: str) -> None:
        """Move a staged file to its place, making directories as needed."""
        self._into_place(staged.replace, key)

    def _into_place(self, move: Callable[[Directory, str], None], key: str) -> bool:
        """Whether directories had to be made for it."""
        names = _names(key)
        try:
            move(self._enter(names[:-1]), names[-1])
        except FileNotFoundError:
            self._forget_removed()
            move(self._enter(names[:-1], make=True), names[-1])
            return True
        return False

    def _flush_name(self, key: str, *, made: bool) -> None:
        """Flush the directory of the object, and those that one is in if they are new."""
        names = _names(key)[:-1]
        self._enter(names).flush()
        while made and names:
            names = names[:-1]
            self._enter(names).flush()

    def sweep(self) -> int:
        """Remove what killed writers left in staging; returns how many files."""
        removed = 0
        with os_errors("sweep", self.url), _absent_is_fine():
            self._forget_removed()
            directory = self._enter(_STAGING)
            with directory.scan() as found:
                for entry in found:
                    with _absent_is_fine():
                        age_s = time.time() - entry.stat(follow_symlinks=False).st_mtime
                        if age_s > _SWEEP_GRACE_S:
                            removed += _remove_unlocked(entry.name, directory)
        return removed


class Staged:
    """A file that is being written, to be moved to its place."""

    __slots__ = ("directory", "fd", "name")

    def __init__(self, directory: Directory, name: str, fd: int) -> None:
        self.directory = directory
        self.name = name
        self.fd = fd

    @property
    def path(self) -> str:
        return f"{self.directory.path}/{self.name}"

    def replace(self, directory: Directory, name: str) -> None:
        """Move it."""
        os.replace(self.name, name, src_dir_fd=self.directory.fd, dst_dir_fd=directory.fd)

    def link(self, directory: Directory, name: str) -> None:
        """Give it another name, unless there is something of that name."""
        os.link(self.name, name, src_dir_fd=self.directory.fd, dst_dir_fd=directory.fd)

    def remove(self) -> None:
        os.unlink(self.name, dir_fd=self.directory.fd)


def mark_used(fd: int) -> None:
    """Have the file's time of last change say now."""
    # The kernel's own clock for files ticks only every few milliseconds.
    now = time.time_ns()
    os.utime(fd, ns=(now, now))


class FileStore:
    """A :class:`~s3cache.store.Store` of files below ``root``; the layout is this module's.

    On NFS, EFS or Lustre it is a shared remote: it is safe for any number of processes on any
    number of machines that see the same file system. ``put`` has reached the disk when it returns.
    Nothing here blocks the event loop: file system calls run on other threads. One that hangs (a
    dead NFS server) fails as a :class:`~s3cache.errors.TransientError` after 15 s, and those after
    it at once, until the file system answers again.

    Raises:
        ConfigError: ``root`` is not a private directory of this user.
        StoreError: ``root`` cannot be created, or its file system hangs.
    """

    def __init__(self, root: str | os.PathLike[str], *, create: bool = True) -> None:
        self._deadline = DeadlineExecutor.of(os.path.abspath(os.fspath(root)))
        self._is_closed = False
        try:
            self._files = self._deadline.call(lambda: _opened(root, create))
        except BaseException:
            self._deadline.release()
            raise

    def __repr__(self) -> str:
        return f"FileStore({self.url!r})"

    @property
    def url(self) -> str:
        return self._files.url

    @overload
    async def get(self, key: str) -> bytes | None: ...
    @overload
    async def get(self, key: str, admit: Admit | None) -> bytes | NotAdmitted | None: ...
    async def get(self, key: str, admit: Admit | None = None) -> bytes | NotAdmitted | None:
        if admit is None:
            return await self._within(lambda: self._files.read(key))
        admitted = 0
        while True:  # once more where a larger one takes the object's place meanwhile
            answer = await self._within(partial(self._files.read_if, key, admitted), size=admitted)
            if not isinstance(answer, NotAdmitted) or not admit(answer.size):
                return answer
            admitted = answer.size

    async def get_range(self, key: str, start: int, length: int) -> bytes | None:
        return await self._within(lambda: self._files.read(key, start, length), size=length)

    async def head(self, key: str) -> ObjectInfo | None:
        return await self._within(lambda: self._files.stat(key))

    async def put(
        self,
        key: str,
        data: Buffer,
        *,
        mode: PutMode = "overwrite",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        write = self._files.create if mode == "create" else self._files.write
        await self._within(lambda: write(key, data), size=memoryview(data).nbytes)

    async def delete(self, key: str) -> None:
        await self._within(lambda: self._files.delete(key))

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        for info in await self._within(lambda: list(self._files.walk(prefix))):
            yield info

    async def atomic_create(self) -> bool:
        return True

    async def aclose(self) -> None:
        """Nothing is held open but idle threads."""
        if not self._is_closed:
            self._is_closed = True
            self._deadline.release()

    async def _within(self, work: Callable[[], _T], *, size: int = 0) -> _T:
        """What ``work`` gives, on another thread, where it may hang: none waits for it for long.

        The loop has few threads, and others need them.
        """
        more_s = (_TIMES - 1) * self._deadline.limit_s + min(size / _BYTES_A_SECOND, _LONGEST_S)
        return await asyncio.to_thread(self._deadline.call, work, more_s=more_s)


def _opened(root: str | os.PathLike[str], create: bool) -> ObjectFiles:
    files = ObjectFiles(root, create=create)
    with contextlib.suppress(ReadOnlyError):  # it can be read all the same
        files.sweep()
    return files


def _names(key: str) -> _Names:
    """Of the directories that hold the object below the root, and of its file."""
    *parents, last = map(_escape, key.split("/"))
    parts = [part for segment in parents for part in _parts(segment, "+")]
    return (*_OBJECTS, *parts, *_parts(last, ""))


def _open_to_read(directory: Directory, name: str) -> int:
    try:
        # Whatever was put there: do not wait for the other end of a pipe.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        return os.open(name, flags, dir_fd=directory.fd)
    except OSError as exc:
        if exc.errno == errno.ELOOP:  # a symbolic link is no object
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name) from exc
        raise


def _stat(directory: Directory, name: str) -> os.stat_result:
    return os.stat(name, dir_fd=directory.fd, follow_symlinks=False)


def _is_object(status: os.stat_result) -> bool:
    """Whether it is a file, and ours: what others planted, while they could, is none."""
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def _absent_is_fine() -> contextlib.suppress:
    return contextlib.suppress(FileNotFoundError, NotADirectoryError)


def _escape(segment: str) -> str:
    if _PLAIN.fullmatch(segment):
        return segment
    text = _MUST_ESCAPE.sub(lambda found: _percent(found[0]), segment)
    return "%2e" + text[1:] if text[:1] == "." else text


def _percent(character: str) -> str:
    # A prefix to list may hold a lone surrogate, which no key does.
    return "".join(f"%{byte:02x}" for byte in character.encode(errors="surrogatepass"))


def _parts(escaped: str, suffix: str) -> list[str]:
    """Path parts for one escaped segment: one, unless it is too long for a file name."""
    if len(escaped) <= PIECE_BYTES:
        return [escaped + suffix]
    pieces = [escaped[i : i + PIECE_BYTES] for i in range(0, len(escaped), PIECE_BYTES)]
    *parents, last = pieces[:1] + ["~" + piece for piece in pieces[1:]]
    return [*(parent + "~" for parent in parents), last + suffix]


def _walk(
    directory: Directory, names: _Names, done: str, prefix: str
) -> Iterator[tuple[_Names, ObjectInfo]]:
    """Files below the directory, with the keys that their names stand for.

    ``done`` is the escaped key so far, ``prefix`` is escaped too.
    """
    with _absent_is_fine(), directory.scan() as found:
        for entry in found:
            name = done + entry.name.removeprefix("~")
            if entry.name[-1] in "+~":
                deeper = _deeper(done, entry.name)
                if deeper.startswith(prefix) or prefix.startswith(deeper):
                    below = _entered(directory, entry.name)
                    if below is not None:
                        yield from _walk(below, (*names, entry.name), deeper, prefix)
            elif name.startswith(prefix) and entry.name[0] != ".":
                yield from _objects_of(directory, [entry.name], names, done)


def _in_any_order(
    directory: Directory, names: _Names, done: str, chance: random.Random
) -> Iterator[list[tuple[_Names, ObjectInfo]]]:
    """Like :func:`_walk`, a few at a time, each from a directory that is drawn by lot."""
    files: list[str] = []
    unopened: list[str] = []
    with _absent_is_fine():
        for name in directory.names():
            if name[-1] in "+~":
                unopened.append(name)
            elif name[0] != ".":
                files.append(name)
    chance.shuffle(files)
    for start in range(0, len(files), _SAMPLED_TOGETHER):
        yield [*_objects_of(directory, files[start : start + _SAMPLED_TOGETHER], names, done)]
    opened: list[Iterator[list[tuple[_Names, ObjectInfo]]]] = []
    while unopened or opened:
        may_open = len(unopened) if len(opened) < _OPEN_AT_MOST else 0
        drawn = chance.randrange(may_open + len(opened))
        if drawn < may_open:
            unopened[drawn], unopened[-1] = unopened[-1], unopened[drawn]
            name = unopened.pop()
            below = _entered(directory, name)
            if below is None:
                continue
            deeper = _deeper(done, name)
            opened.append(_in_any_order(below, (*names, name), deeper, chance))
            drawn = -1
        else:
            drawn -= may_open
        batch = next(opened[drawn], None)
        if batch is None:
            opened[drawn] = opened[-1]
            opened.pop()
        else:
            yield batch


def _entered(directory: Directory, name: str) -> Directory | None:
    """A directory to scan, unless it is gone or not ours."""
    with _absent_is_fine(), contextlib.suppress(ConfigError):
        return directory.enter(name)
    return None


def _deeper(done: str, name: str) -> str:
    """The escaped key so far, in the directory called ``name``."""
    return done + name.removeprefix("~")[:-1] + ("/" if name[-1] == "+" else "")


def _objects_of(
    directory: Directory, files: Iterable[str], names: _Names, done: str
) -> Iterator[tuple[_Names, ObjectInfo]]:
    for name in files:
        with _absent_is_fine():
            status = _stat(directory, name)
            if _is_object(status):
                key = unquote(done + name.removeprefix("~"))
                yield (*names, name), ObjectInfo(key, status.st_size, status.st_mtime)


def _read_exactly(fd: int, size: int, start: int) -> bytes:
    if not size:
        return b""
    data = os.pread(fd, size, start)
    while len(data) < size:  # one read gives at most 2 GiB
        more = os.pread(fd, size - len(data), start + len(data))
        if not more:
            break
        data += more
    return data


def _write_all(fd: int, data: Buffer) -> None:
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(fd, view) :]


def _flush_data(fd: int) -> None:
    # macOS has no fdatasync
    (os.fdatasync if hasattr(os, "fdatasync") else os.fsync)(fd)


def _remove_unlocked(name: str, directory: Directory) -> int:
    # NFS locks exclusively only what is open for writing: flock(2)
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(name, flags, dir_fd=directory.fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # its writer lives, or that cannot be found out
        return 0
    else:
        os.unlink(name, dir_fd=directory.fd)
        return 1
    finally:
        os.close(fd)
