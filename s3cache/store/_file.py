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
import fcntl
import itertools
import os
import random
import re
import secrets
import stat
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import overload
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
from s3cache.store._patience import Patience

__all__ = ["FileStore", "ObjectFiles", "make_private"]

_PLAIN = re.compile(r"[a-z0-9_=-][a-z0-9_.=-]*")
_MUST_ESCAPE = re.compile(r"[^a-z0-9_.=-]")
PIECE_BYTES = 200  # file names may have 255 bytes; the rest is room for the suffix

# A writer locks its staged file right after creating it; the sweep leaves it that long to do so.
_SWEEP_GRACE_S = 60.0
# Of one directory, so many objects are looked at before others get their turn.
_SAMPLED_TOGETHER = 128


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
        self._objects = os.path.join(self.root, "objects")
        self._staging = os.path.join(self.root, "staging")
        with os_errors("open", self.url):
            if create:
                self.ensure()
            else:
                check_private(self.root)

    def ensure(self) -> None:
        """Make the root and what belongs in it, as far as it is missing; check that it is ours."""
        _make_parents(self.root)
        make_private(self.root)
        check_private(self.root)
        for inside in (self._objects, self._staging):
            make_private(inside)
            check_private(inside)

    # -- reading

    def path(self, key: str) -> str:
        """The file that holds (or would hold) ``key``."""
        *parents, last = map(_escape, key.split("/"))
        parts = [part for segment in parents for part in _parts(segment, "+")]
        return os.path.join(self._objects, *parts, *_parts(last, ""))

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

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[tuple[int | None, int]]:
        """A descriptor of the object's file, and its size; no descriptor where there is none."""
        check_key(key)
        with os_errors("get", self.url, key):
            try:
                fd = os.open(self.path(key), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except (FileNotFoundError, NotADirectoryError):
                yield None, 0
                return
            try:
                yield fd, os.fstat(fd).st_size
            finally:
                os.close(fd)

    def stat(self, key: str) -> ObjectInfo | None:
        """The object's size and time of last change, or ``None`` where absent."""
        check_key(key)
        with os_errors("head", self.url, key):
            try:
                status = os.stat(self.path(key), follow_symlinks=False)
            except (FileNotFoundError, NotADirectoryError):
                return None
        return ObjectInfo(key, status.st_size, status.st_mtime)

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
        with os_errors("list", self.url, prefix):
            for path, info in _walk(os.path.join(self._objects, *parts), done, done + last):
                if is_key(info.key) and self.path(info.key) == path:
                    yield info

    def sample(self, at_least: int) -> tuple[list[ObjectInfo], bool]:
        """Some of the objects, drawn at random by directories, and whether these are all.

        Costs as much as there are objects in it, and not as much as there are in all.
        """
        found: list[ObjectInfo] = []
        chance = random.Random()  # noqa: S311 - of its own: programs count on what theirs draws
        with os_errors("list", self.url):
            for batch in _in_any_order(self._objects, "", chance):
                found += (
                    info for path, info in batch if is_key(info.key) and self.path(info.key) == path
                )
                if len(found) >= at_least:
                    return found, False
        return found, True

    # -- writing

    def write(self, key: str, data: Buffer) -> None:
        """Write or replace the object, atomically; bytes and name have reached the disk then."""
        with self.staged(key, data, durable=True) as staged:
            target = self.path(key)
            made = self._into_place(os.replace, staged, target)
            self._flush_name(target, made)

    def create(self, key: str, data: Buffer) -> None:
        """Write the object durably unless it exists; exactly one of several creators wins.

        Raises:
            PreconditionError: the object exists; it was left alone.
        """
        with self.staged(key, data, durable=True) as staged:
            target = self.path(key)
            try:
                # Unlike rename, link refuses an existing name, on NFS too.
                made = self._into_place(os.link, staged, target)
            except FileExistsError:
                raise PreconditionError(
                    "already exists", op="put", store=self.url, key=key
                ) from None
            os.unlink(staged)
            self._flush_name(target, made)

    def delete(self, key: str) -> None:
        """Remove the object, if there is one."""
        check_key(key)
        with os_errors("delete", self.url, key), _absent_is_fine():
            os.unlink(self.path(key))

    @contextlib.contextmanager
    def staged(self, key: str, data: Buffer, *, durable: bool) -> Iterator[str]:
        """Write ``data`` to a staged file and give its path, for the block to move or remove.

        With ``durable`` the bytes have reached the disk. If the block fails nothing is left.
        """
        check_key(key)
        with os_errors("put", self.url, key):
            try:
                path, fd = self._open_staged()
            except FileNotFoundError:  # the root was removed under us: begin anew
                self.ensure()
                path, fd = self._open_staged()
            try:
                _write_all(fd, data)
                if durable:
                    _flush_data(fd)
                yield path
            except BaseException:
                with contextlib.suppress(OSError):  # moved, or left to the sweep
                    os.unlink(path)
                raise
            finally:
                os.close(fd)

    def _open_staged(self) -> tuple[str, int]:
        """A new file in staging, locked so that no sweep takes it as long as we live."""
        while True:
            path = os.path.join(self._staging, secrets.token_hex(8))
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(fd).st_nlink:
                    return path, fd
            except BlockingIOError:
                pass
            except OSError:  # some network mounts have no locks, and no sweep either
                return path, fd
            # Stopped between the two calls for so long that a sweep took the file: another one.
            os.close(fd)

    def rename(self, staged: str, key: str) -> None:
        """Move a staged file to its place, making directories as needed."""
        self._into_place(os.replace, staged, self.path(key))

    def _into_place(self, move: Callable[[str, str], None], staged: str, target: str) -> bool:
        """Whether directories had to be made for it."""
        try:
            move(staged, target)
        except FileNotFoundError:
            self._make_parents(target)
            move(staged, target)
            return True
        return False

    def _make_parents(self, path: str) -> None:
        """The directories that ``path`` is in: seldom more than the last is missing."""
        parent = os.path.dirname(path)
        try:
            make_private(parent)
        except FileNotFoundError:
            if parent == self._objects:
                self.ensure()
            else:
                self._make_parents(parent)
                make_private(parent)

    def _flush_name(self, target: str, made: bool) -> None:
        """Flush the directory ``target`` is in, and those it is in if they are new."""
        path = os.path.dirname(target)
        _flush_directory(path)
        while made and path != self.root:
            path = os.path.dirname(path)
            _flush_directory(path)

    def sweep(self) -> int:
        """Remove what killed writers left in staging; returns how many files."""
        removed = 0
        with os_errors("sweep", self.url), _absent_is_fine(), os.scandir(self._staging) as found:
            for entry in found:
                with _absent_is_fine():
                    if time.time() - entry.stat().st_mtime > _SWEEP_GRACE_S:
                        removed += _remove_unlocked(entry.path)
        return removed


class FileStore:
    """A :class:`~s3cache.store.Store` of files below ``root``; the layout is this module's.

    On NFS, EFS or Lustre it is a shared remote: it is safe for any number of processes on any
    number of machines that see the same file system. ``put`` has reached the disk when it returns.
    Nothing here blocks the event loop: file system calls run on the loop's executor.

    Raises:
        ConfigError: ``root`` is not a private directory of this user.
        StoreError: ``root`` cannot be created, or its file system hangs.
    """

    def __init__(self, root: str | os.PathLike[str], *, create: bool = True) -> None:
        patience = Patience.of(os.path.abspath(os.fspath(root)))
        try:
            self._files = patience.call(lambda: _opened(root, create))
        finally:
            patience.release()

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
            return await asyncio.to_thread(self._files.read, key)
        admitted = 0
        while True:  # once more where a larger one takes the object's place meanwhile
            answer = await asyncio.to_thread(self._files.read_if, key, admitted)
            if not isinstance(answer, NotAdmitted) or not admit(answer.size):
                return answer
            admitted = answer.size

    async def get_range(self, key: str, start: int, length: int) -> bytes | None:
        return await asyncio.to_thread(self._files.read, key, start, length)

    async def head(self, key: str) -> ObjectInfo | None:
        return await asyncio.to_thread(self._files.stat, key)

    async def put(
        self,
        key: str,
        data: Buffer,
        *,
        mode: PutMode = "overwrite",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        write = self._files.create if mode == "create" else self._files.write
        await asyncio.to_thread(write, key, data)

    async def delete(self, key: str) -> None:
        await asyncio.to_thread(self._files.delete, key)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        for info in await asyncio.to_thread(lambda: list(self._files.walk(prefix))):
            yield info

    async def atomic_create(self) -> bool:
        return True

    async def aclose(self) -> None:
        """Nothing is held open."""


def _opened(root: str | os.PathLike[str], create: bool) -> ObjectFiles:
    files = ObjectFiles(root, create=create)
    with contextlib.suppress(ReadOnlyError):  # it can be read all the same
        files.sweep()
    return files


def make_private(path: str) -> None:
    """Make a directory that only we can enter, unless there is something of that name."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)


def check_private(path: str) -> None:
    """Raises :class:`ConfigError` unless ``path`` is a directory only its owner, us, can write."""
    status = os.lstat(path)
    problem = fix = ""
    if stat.S_ISLNK(status.st_mode):
        problem, fix = "is a symbolic link", "give the directory it points to"
    elif not stat.S_ISDIR(status.st_mode):
        problem, fix = "is no directory", "remove the file or give another path"
    elif status.st_uid != os.geteuid():
        problem = f"belongs to user id {status.st_uid}, not to {os.geteuid()}"
        fix = "give a directory of your own"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem = f"can be written by others (mode {stat.S_IMODE(status.st_mode):04o})"
        fix = f"run: chmod go-w {path}"
    if problem:
        raise ConfigError(f"directory {path}", problem, fix)
    for above in _above(os.path.realpath(path)):
        mode = os.lstat(above).st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise ConfigError(
                f"directory {path}",
                f"lies in {above}, in which anybody may rename it (mode {stat.S_IMODE(mode):04o})",
                f"run: chmod o-w {above}, or chmod +t {above}",
            )


def _above(path: str) -> Iterator[str]:
    """The directories that ``path`` lies in, the innermost first."""
    while (above := os.path.dirname(path)) != path:
        yield above
        path = above


def _make_parents(path: str) -> None:
    """Make the directories that ``path`` is to lie in, which others may never write."""
    missing = itertools.takewhile(lambda above: not os.path.isdir(above), _above(path))
    for above in reversed(list(missing)):
        with contextlib.suppress(FileExistsError):
            os.mkdir(above, 0o755)


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


def _walk(path: str, done: str, prefix: str) -> Iterator[tuple[str, ObjectInfo]]:
    """Files below ``path`` with the keys that their names stand for.

    ``done`` is the escaped key so far, ``prefix`` is escaped too.
    """
    with _absent_is_fine(), os.scandir(path) as found:
        for entry in found:
            name = done + entry.name.removeprefix("~")
            if entry.name[-1] in "+~":
                deeper = _deeper(done, entry.name)
                if deeper.startswith(prefix) or prefix.startswith(deeper):
                    yield from _walk(entry.path, deeper, prefix)
            elif name.startswith(prefix) and entry.name[0] != ".":
                yield from _objects_of([entry], done)


def _in_any_order(
    path: str, done: str, chance: random.Random
) -> Iterator[list[tuple[str, ObjectInfo]]]:
    """Like :func:`_walk`, a few at a time, each from a directory that is drawn by lot."""
    files: list[os.DirEntry[str]] = []
    unopened: list[os.DirEntry[str]] = []
    with _absent_is_fine(), os.scandir(path) as found:
        for entry in found:
            if entry.name[-1] in "+~":
                unopened.append(entry)
            elif entry.name[0] != ".":
                files.append(entry)
    chance.shuffle(files)
    for start in range(0, len(files), _SAMPLED_TOGETHER):
        yield [*_objects_of(files[start : start + _SAMPLED_TOGETHER], done)]
    opened: list[Iterator[list[tuple[str, ObjectInfo]]]] = []
    while unopened or opened:
        drawn = chance.randrange(len(unopened) + len(opened))
        if drawn < len(unopened):
            unopened[drawn], unopened[-1] = unopened[-1], unopened[drawn]
            entry = unopened.pop()
            opened.append(_in_any_order(entry.path, _deeper(done, entry.name), chance))
            drawn = -1
        else:
            drawn -= len(unopened)
        batch = next(opened[drawn], None)
        if batch is None:
            opened[drawn] = opened[-1]
            opened.pop()
        else:
            yield batch


def _deeper(done: str, name: str) -> str:
    """The escaped key so far, in the directory called ``name``."""
    return done + name.removeprefix("~")[:-1] + ("/" if name[-1] == "+" else "")


def _objects_of(entries: Iterable[os.DirEntry[str]], done: str) -> Iterator[tuple[str, ObjectInfo]]:
    for entry in entries:
        with _absent_is_fine():
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                key = unquote(done + entry.name.removeprefix("~"))
                yield entry.path, ObjectInfo(key, status.st_size, status.st_mtime)


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


def _flush_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)  # fdatasync need not write names: they are not what a directory's size counts
    finally:
        os.close(fd)


def _remove_unlocked(path: str) -> int:
    # NFS locks exclusively only what is open for writing: flock(2)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # its writer lives, or nobody can tell
        return 0
    else:
        os.unlink(path)
        return 1
    finally:
        os.close(fd)
