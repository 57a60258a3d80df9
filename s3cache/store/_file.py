"""Objects as files below one private directory, the store that they make, and one in memory.

Layout, every name below ``root``::

    objects/<segment>+/.../<segment>    one file an object; "/" in a key makes a directory
    staging/<random>                    being written; renamed into objects/ when complete

A directory's name ends in ``+``, which no key has, so a key may be a prefix of another. All else is
not ours (NFS puts ``.nfs...`` where an open file is deleted).

Writers never touch a visible file: they stage, flush and rename, so a reader in any process sees
whole objects only. What was not written to for an hour was left by a killed writer, and is swept.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import stat
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar, overload
from urllib.parse import quote

from s3cache.errors import ConfigError, PreconditionError, ReadOnlyError
from s3cache.store._base import (
    AcceptSize,
    Buffer,
    NotAccepted,
    ObjectInfo,
    PutMode,
    Store,
    check_key,
    check_range,
    is_key,
)
from s3cache.store._directory import Directory, make_parents, os_errors
from s3cache.util.threads import DeadlineExecutor

_T = TypeVar("_T")

_OBJECTS = ("objects",)
_STAGING = ("staging",)
_SWEPT_AFTER_S = 3_600.0

# The time limit of a FileStore, in those of a local disk, and a second more for so many bytes.
_TIMES_AS_LONG = 3
_BYTES_A_SECOND = 8 << 20
_MAX_TRANSFER_S = 600.0


class ObjectFiles:
    """Objects as files. Synchronous; any number of threads and processes may share ``root``.

    A missing ``root`` is made with mode 0700, and its parents with 0755 at most.

    Raises:
        ConfigError: ``root``, or what belongs in it, is a symbolic link, no directory, another
            user's, or writable by group or others; or anybody may rename what is in a directory
            above it. A user who can write there can run code in every reader.
        StoreError: it cannot be created.
    """

    def __init__(self, root: str | os.PathLike[str], *, create: bool = True) -> None:
        self.root = os.path.abspath(os.fspath(root))
        self.url = f"file://{quote(self.root)}"
        self._root: Directory | None = None
        with os_errors("open", self.url):
            if create:
                self.ensure()
            else:
                self._enter(())

    def ensure(self) -> None:
        """Make the root and what belongs in it, as far as it is missing; check that it is ours."""
        for names in (_OBJECTS, _STAGING):
            self._enter(names, make=True)

    def directory(self, name: str = "", *, make: bool = False) -> Directory:
        """Return the root, or a directory in it, to work in by its descriptor.

        Raises:
            FileNotFoundError: it is missing, and ``make`` is not set.
            ConfigError: it is not ours alone.
        """
        return self._enter((name,) if name else (), make=make)

    def _enter(self, names: Iterable[str], *, make: bool = False) -> Directory:
        # The root stays open, wherever it is moved; if it was removed another one is looked for.
        directory = self._root
        if directory is None or not os.fstat(directory.fd).st_nlink:
            if make:
                make_parents(self.root)
            directory = self._root = Directory.at(self.root, make=make)
        for name in names:
            directory = directory.enter(name, make=make)
        return directory

    def _at(self, key: str, act: Callable[[Directory, str], _T]) -> _T:
        """Return what ``act`` does with the directory and the name of the object's file."""
        parents, name = _names(key)
        return act(self._enter(parents), name)

    # -- reading

    def path(self, key: str) -> str:
        """Return the file that holds (or would hold) ``key``."""
        parents, name = _names(key)
        return os.path.join(self.root, *parents, name)

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes | None:
        """Return the object's bytes, or ``length`` of them from ``start``; None if absent."""
        if length is not None:
            check_range(start, length)

        def read(fd: int, size: int) -> bytes:
            left = max(size - start, 0)
            return _read(fd, left if length is None else min(length, left), start)

        return self._with_file(key, read)

    def read_if(self, key: str, at_most: int) -> bytes | NotAccepted | None:
        """Return the object's bytes if they are no more than ``at_most``; None if absent."""
        return self._with_file(
            key, lambda fd, size: NotAccepted(size) if size > at_most else _read(fd, size)
        )

    def use(self, key: str) -> bytes | None:
        """Return what :meth:`read` does, and mark the object as used just now."""

        def read(fd: int, size: int) -> bytes:
            data = _read(fd, size)
            # On a disk that became read-only the bytes are good all the same.
            with contextlib.suppress(OSError):
                mark_used(fd)
            return data

        return self._with_file(key, read)

    def _with_file(self, key: str, act: Callable[[int, int], _T]) -> _T | None:
        """Return what ``act`` makes of the descriptor of the object's file and its size."""
        check_key(key)
        with os_errors("get", self.url, key), _absent_is_fine():
            fd = self._at(key, _open_to_read)
            try:
                status = os.fstat(fd)
                return act(fd, status.st_size) if _is_object(status) else None
            finally:
                os.close(fd)
        return None

    def stat(self, key: str) -> ObjectInfo | None:
        """Return the object's size and time of last change, or None if absent."""
        check_key(key)
        with os_errors("head", self.url, key), _absent_is_fine():
            status = self._at(key, _stat)
            if _is_object(status):
                return ObjectInfo(key, status.st_size, status.st_mtime)
        return None

    def walk(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield every object with a key below ``prefix``; not all that are deleted meanwhile."""
        above, slash, _ = prefix.rpartition("/")
        if above and not is_key(above):
            return
        names = [f"{segment}+" for segment in above.split("/") if segment]
        with os_errors("list", self.url, prefix), _absent_is_fine():
            yield from _walk(self._enter((*_OBJECTS, *names)), above + slash, prefix)

    # -- writing

    def write(self, key: str, data: Buffer) -> None:
        """Write or replace the object, atomically; bytes and name have reached the disk then."""
        with self.staged(key, data, durable=True) as staged:
            self._place(staged, key, os.replace, durable=True)

    def create(self, key: str, data: Buffer) -> None:
        """Write the object durably unless it exists; exactly one of several creators wins.

        Raises:
            PreconditionError: the object exists; it was left alone.
        """
        with self.staged(key, data, durable=True) as staged:
            try:
                # Unlike rename, link refuses an existing name, on NFS too.
                self._place(staged, key, os.link, durable=True)
            except FileExistsError:
                problem = "already exists"
                raise PreconditionError(problem, op="put", store=self.url, key=key) from None
            os.unlink(staged.name, dir_fd=staged.directory.fd)

    def delete(self, key: str) -> None:
        """Remove the object, if there is one."""
        check_key(key)
        with os_errors("delete", self.url, key), _absent_is_fine():
            self._at(key, lambda directory, name: os.unlink(name, dir_fd=directory.fd))

    def move(self, key: str, target: Directory, name: str) -> None:
        """Move the object to another directory, in which it is called ``name``."""

        def replace(directory: Directory, file: str) -> None:
            os.replace(file, name, src_dir_fd=directory.fd, dst_dir_fd=target.fd)

        self._at(key, replace)

    @contextlib.contextmanager
    def staged(self, key: str, data: Buffer, *, durable: bool) -> Iterator[Staged]:
        """Write ``data`` to a staged file, for the block to move or remove.

        With ``durable`` the bytes have reached the disk. If the block fails nothing is left.
        """
        check_key(key)
        with os_errors("put", self.url, key):
            directory, name = self._enter(_STAGING, make=True), secrets.token_hex(8)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            staged = Staged(directory, name, os.open(name, flags, 0o600, dir_fd=directory.fd))
            try:
                view = memoryview(data).cast("B")
                while view:
                    view = view[os.write(staged.fd, view) :]
                if durable:
                    # macOS has no fdatasync
                    (os.fdatasync if hasattr(os, "fdatasync") else os.fsync)(staged.fd)
                yield staged
            except BaseException:
                with contextlib.suppress(OSError):  # moved, or left to the sweep
                    os.unlink(name, dir_fd=directory.fd)
                raise
            finally:
                os.close(staged.fd)

    def rename(self, staged: Staged, key: str) -> None:
        """Move a staged file to its place, making directories as needed."""
        self._place(staged, key, os.replace)

    def _place(
        self, staged: Staged, key: str, move: Callable[..., None], *, durable: bool = False
    ) -> None:
        parents, name = _names(key)
        depths = range(len(parents), len(parents) - 1, -1)
        try:
            directory = self._enter(parents)
        except FileNotFoundError:
            directory = self._enter(parents, make=True)
            depths = range(len(parents), -1, -1)  # those above may be new
        source = staged.directory
        move(staged.name, name, src_dir_fd=source.fd, dst_dir_fd=directory.fd)
        for depth in depths if durable else ():
            directory = self._enter(parents[:depth])
            os.fsync(directory.fd)  # fdatasync need not: a directory's size does not count names

    def sweep(self) -> int:
        """Remove what killed writers left in staging; return how many files."""
        removed = 0
        with os_errors("sweep", self.url), _absent_is_fine():
            directory = self._enter(_STAGING)
            with directory.scan() as entries:
                for entry in entries:
                    with _absent_is_fine():
                        changed = entry.stat(follow_symlinks=False).st_mtime
                        if time.time() - changed > _SWEPT_AFTER_S:
                            os.unlink(entry.name, dir_fd=directory.fd)
                            removed += 1
        return removed


class Staged(NamedTuple):
    """A file that is being written, to be moved to its place."""

    directory: Directory
    name: str
    fd: int


def mark_used(fd: int) -> None:
    """Set the file's time of last change to now."""
    # The kernel's own clock for files ticks only every few milliseconds.
    now = time.time_ns()
    os.utime(fd, ns=(now, now))


def _names(key: str) -> tuple[list[str], str]:
    """Return the names of the directories that hold the object below the root, and of its file."""
    *parents, name = key.split("/")
    return [*_OBJECTS, *(f"{parent}+" for parent in parents)], name


def _walk(directory: Directory, done: str, prefix: str) -> Iterator[ObjectInfo]:
    """Yield the objects in the directory with keys that begin with ``done``."""
    with _absent_is_fine(), directory.scan() as entries:
        for entry in entries:
            name = entry.name
            key = done + (f"{name[:-1]}/" if name.endswith("+") else name)
            if key.endswith("/") and (key.startswith(prefix) or prefix.startswith(key)):
                with _absent_is_fine(), contextlib.suppress(ConfigError):  # gone, or not ours
                    yield from _walk(directory.enter(name), key, prefix)
            elif key.startswith(prefix) and is_key(key):
                with _absent_is_fine():
                    if _is_object(status := _stat(directory, name)):
                        yield ObjectInfo(key, status.st_size, status.st_mtime)


def _open_to_read(directory: Directory, name: str) -> int:
    try:
        # Do not wait for the other end of a pipe that was put there.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        return os.open(name, flags, dir_fd=directory.fd)
    except OSError as exc:
        if exc.errno == errno.ELOOP:  # a symbolic link is no object
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name) from exc
        raise


def _stat(directory: Directory, name: str) -> os.stat_result:
    return os.stat(name, dir_fd=directory.fd, follow_symlinks=False)


def _is_object(status: os.stat_result) -> bool:
    """Return whether it is a file of ours: one that another user planted is no object."""
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def _absent_is_fine() -> contextlib.suppress:
    return contextlib.suppress(FileNotFoundError, NotADirectoryError)


def _read(fd: int, size: int, start: int = 0) -> bytes:
    data = os.pread(fd, size, start) if size else b""
    while len(data) < size:  # one read gives at most 2 GiB
        more = os.pread(fd, size - len(data), start + len(data))
        if not more:
            break
        data += more
    return data


class FileStore(Store):
    """A store of files below ``root``, which any processes on any machines may share.

    So on NFS, EFS or Lustre it is a remote. ``put`` has reached the disk when it returns. File
    system calls run on other threads. One that hangs (a dead NFS server) fails as a
    ``TransientError`` after 15 s, and those after it at once, until the file system answers again.

    Raises:
        ConfigError: ``root`` is not a private directory of this user.
        StoreError: ``root`` cannot be created, or its file system hangs.
    """

    def __init__(self, root: str | os.PathLike[str], *, create: bool = True) -> None:
        self._executor = DeadlineExecutor.of(os.path.abspath(os.fspath(root)))
        self._is_closed = False

        def open_files() -> ObjectFiles:
            files = ObjectFiles(root, create=create)
            with contextlib.suppress(ReadOnlyError):  # it can be read all the same
                files.sweep()
            return files

        try:
            self._files = self._executor.call(open_files)
        except BaseException:
            self._executor.release()
            raise

    def __repr__(self) -> str:
        return f"FileStore({self.url!r})"

    @property
    def url(self) -> str:
        return self._files.url

    @overload
    async def get(self, key: str) -> bytes | None: ...
    @overload
    async def get(self, key: str, accept_size: AcceptSize | None) -> bytes | NotAccepted | None: ...
    async def get(self, key: str, accept_size: AcceptSize | None = None) -> Any:
        if accept_size is None:
            return await self._call(lambda: self._files.read(key))
        accepted = 0
        while True:  # once more where a larger one takes the object's place meanwhile
            answer = await self._call(partial(self._files.read_if, key, accepted), size=accepted)
            if not isinstance(answer, NotAccepted) or not accept_size(answer.size):
                return answer
            accepted = answer.size

    async def get_range(self, key: str, start: int, length: int) -> Buffer | None:
        return await self._call(lambda: self._files.read(key, start, length), size=length)

    async def head(self, key: str) -> ObjectInfo | None:
        return await self._call(lambda: self._files.stat(key))

    async def put(
        self,
        key: str,
        data: Buffer,
        *,
        mode: PutMode = "overwrite",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        write = self._files.create if mode == "create" else self._files.write
        await self._call(lambda: write(key, data), size=memoryview(data).nbytes)

    async def delete(self, key: str) -> None:
        await self._call(lambda: self._files.delete(key))

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        for info in await self._call(lambda: list(self._files.walk(prefix))):
            yield info

    async def aclose(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._executor.release()

    async def _call(self, work: Callable[[], _T], *, size: int = 0) -> _T:
        """Return what ``work`` does on another thread, within the store's time limit."""
        more_s = (_TIMES_AS_LONG - 1) * self._executor.limit_s
        more_s += min(size / _BYTES_A_SECOND, _MAX_TRANSFER_S)
        return await asyncio.to_thread(self._executor.call, work, more_s=more_s)


class MemoryStore(Store):
    """A store in this process's memory, for tests and trials; closed, it keeps its objects."""

    def __init__(self, name: str = "") -> None:
        self._url = f"memory://{name}"
        self._objects: dict[str, tuple[bytes, float]] = {}

    def __repr__(self) -> str:
        return f"MemoryStore({self._url!r})"

    @property
    def url(self) -> str:
        return self._url

    async def get(self, key: str, accept_size: AcceptSize | None = None) -> Any:
        data, _ = self._objects.get(check_key(key), (None, 0.0))
        if data is None or accept_size is None or accept_size(len(data)):
            return data
        return NotAccepted(len(data))

    async def get_range(self, key: str, start: int, length: int) -> Buffer | None:
        check_range(start, length)
        data, _ = self._objects.get(check_key(key), (None, 0.0))
        return None if data is None else data[start : start + length]

    async def head(self, key: str) -> ObjectInfo | None:
        data, modified = self._objects.get(check_key(key), (None, 0.0))
        return None if data is None else ObjectInfo(key, len(data), modified)

    async def put(
        self,
        key: str,
        data: Buffer,
        *,
        mode: PutMode = "overwrite",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        if check_key(key) in self._objects and mode == "create":
            raise PreconditionError("exists already", op="put", store=self._url, key=key)
        self._objects[key] = (bytes(data), time.time())

    async def delete(self, key: str) -> None:
        self._objects.pop(check_key(key), None)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        for key, (data, modified) in tuple(self._objects.items()):
            if key.startswith(prefix):
                yield ObjectInfo(key, len(data), modified)
