"""Objects as files below one private directory, and the store that they make.

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
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar
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
    os_errors,
)
from s3cache.store._private import is_writable_by_others, make_parents
from s3cache.util.threads import DeadlineExecutor, close_unshared, open_unshared

_T = TypeVar("_T")

_SWEPT_AFTER_S = 3_600.0

# The time limit of a FileStore, in those of a local disk, and a second more for so many bytes.
_TIMES_AS_LONG = 3
_BYTES_A_SECOND = 8 << 20
_MAX_TRANSFER_S = 600.0

# -- directories

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Directory:
    """An open directory that only its owner, us, can write in; closed with its last reference.

    It is checked when it is opened, and worked in by ``fd``, also after it is renamed or replaced.
    Code that uses ``fd`` keeps a reference until the call has returned.
    """

    __slots__ = ("fd", "path")

    def __init__(self, fd: int, path: str) -> None:
        self.fd = fd
        self.path = path

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError, TypeError):
            os.close(self.fd)

    @classmethod
    def at(cls, path: str, *, make: bool = False) -> Directory:
        """Open the directory at ``path``, made with mode 0700 if missing and ``make`` is set.

        Raises:
            ConfigError: it is a symbolic link, no directory, another user's, or writable by
                others; or anybody may rename what is in a directory above it.
        """
        if make:
            make_parents(path)
        directory = cls._open(path, path, None, make)
        above = os.path.realpath(path)
        while above != (above := os.path.dirname(above)):
            mode = stat.S_IMODE(os.stat(above).st_mode)
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                raise ConfigError(
                    f"directory {path}",
                    f"lies in {above}, in which anybody may rename it (mode {mode:04o})",
                    f"run: chmod o-w {above}, or chmod +t {above}",
                )
        return directory

    def enter(self, name: str, *, make: bool = False) -> Directory:
        """Open the directory called ``name`` in this one, made if missing and ``make`` is set.

        Raises:
            ConfigError: it is a symbolic link, another user's, or writable by others.
        """
        return self._open(name, f"{self.path}/{name}", self.fd, make)

    @classmethod
    def _open(cls, name: str, path: str, dir_fd: int | None, make: bool) -> Directory:
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=dir_fd)
        try:
            fd = os.open(name, _FLAGS, dir_fd=dir_fd)
        except OSError as exc:
            if exc.errno in (errno.ELOOP, errno.ENOTDIR):
                status = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
                if dir_fd is None or make or stat.S_ISLNK(status.st_mode):
                    _check_directory(status, path)
            raise
        directory = cls(fd, path)
        _check_directory(os.fstat(fd), path)
        return directory

    @contextlib.contextmanager
    def scan(self) -> Iterator[Iterator[os.DirEntry[str]]]:
        """Give the block the directory's entries."""
        # Of a descriptor, two concurrent readers would get some of the entries each.
        fd = os.open(".", _FLAGS, dir_fd=self.fd)
        try:
            with os.scandir(fd) as entries:
                yield entries
        finally:
            os.close(fd)

    def names(self) -> list[str]:
        """Return the names of all that is in it."""
        with self.scan() as entries:
            return [entry.name for entry in entries]

    def open_private(self, name: str, flags: int) -> int:
        """Open a file that only this user's caches write; ``close_unshared`` closes it.

        What was planted under its name while others could write here is removed: its owner may
        change it, or it leads our writes elsewhere. So ``flags`` must not have ``O_TRUNC``.
        """
        while True:
            try:
                fd = open_unshared(name, flags | os.O_NONBLOCK, dir_fd=self.fd)
                status = os.fstat(fd)
                if _is_object(status) and status.st_nlink <= 1:  # 0: it was just removed
                    return fd
                close_unshared(fd)
            except OSError as exc:
                if exc.errno not in (errno.ELOOP, errno.ENXIO):  # a link or a socket
                    raise
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self.fd)

    def try_lock(self, name: str) -> int | None:
        """Open and lock a private file, made if missing; return None if another process has it.

        ``close_unshared`` unlocks it.
        """
        fd = self.open_private(name, os.O_RDWR | os.O_CREAT)
        is_ours = False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = os.fstat(fd).st_nlink > 0  # else it was removed: others use a new one
        except BlockingIOError:
            pass
        finally:
            if not is_ours:
                close_unshared(fd)
        return fd if is_ours else None


def _check_directory(status: os.stat_result, path: str) -> None:
    problem = fix = ""
    if stat.S_ISLNK(status.st_mode):
        problem, fix = "is a symbolic link", "give the directory it points to"
    elif not stat.S_ISDIR(status.st_mode):
        problem, fix = "is no directory", "remove the file or give another path"
    elif status.st_uid != os.geteuid():
        problem = f"belongs to user id {status.st_uid}, not to {os.geteuid()}"
        fix = "give a directory of your own"
    elif status.st_mode & 0o022 and is_writable_by_others(status):
        problem = f"can be written by others (mode {stat.S_IMODE(status.st_mode):04o})"
        fix = f"run: chmod go-w {path}"
    if problem:
        raise ConfigError(f"directory {path}", problem, fix)


# -- objects


class ObjectFiles:
    """Objects as files. Synchronous; any number of threads and processes may share ``root``.

    A missing ``root`` is made with mode 0700, and its parents with 0755 at most.

    Raises:
        ConfigError: another user can write in ``root`` or exchange it, and so run code in every
            reader; see :meth:`Directory.at`.
        StoreError: it cannot be created.
    """

    def __init__(self, root: str | os.PathLike[str], *, create: bool = True) -> None:
        self.root = os.path.abspath(os.fspath(root))
        self.url = f"file://{quote(self.root)}"
        self._root: Directory | None = None
        with os_errors("open", self.url):
            for name in ("objects", "staging") if create else ():
                self.directory(name, make=True)
            self.directory()
        if create:
            with contextlib.suppress(ReadOnlyError):  # it can be read all the same
                self.sweep()

    def directory(self, *names: str, make: bool = False) -> Directory:
        """Return the root, or a directory in it, to work in by its descriptor."""
        # The root stays open, wherever it is moved; if it was removed another one is looked for.
        directory = self._root
        if directory is None or not os.fstat(directory.fd).st_nlink:
            directory = self._root = Directory.at(self.root, make=make)
        for name in names:
            directory = directory.enter(name, make=make)
        return directory

    # -- reading

    def read(
        self, key: str, start: int = 0, length: int | None = None, *, is_use: bool = False
    ) -> bytes | None:
        """Return the object's bytes, or ``length`` of them from ``start``; None if absent.

        With ``is_use`` the object is marked as used just now.
        """
        check_key(key)
        if length is not None:
            check_range(start, length)
        parents, name = _names(key)
        data = None
        with os_errors("get", self.url, key), _absent_is_fine():
            # Do not wait for the other end of a pipe that was put there.
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            directory = self.directory(*parents)
            fd = os.open(name, flags, dir_fd=directory.fd)
            try:
                status = os.fstat(fd)
                if _is_object(status):
                    left = max(status.st_size - start, 0)
                    data = _read(fd, left if length is None else min(length, left), start)
                    if is_use:
                        # On a disk that became read-only the bytes are good all the same.
                        with contextlib.suppress(OSError):
                            mark_used(fd)
            finally:
                os.close(fd)
        return data

    def stat(self, key: str) -> ObjectInfo | None:
        """Return the object's size and time of last change, or None if absent."""
        check_key(key)
        parents, name = _names(key)
        with os_errors("head", self.url, key), _absent_is_fine():
            directory = self.directory(*parents)
            status = os.stat(name, dir_fd=directory.fd, follow_symlinks=False)
            if _is_object(status):
                return ObjectInfo(key, status.st_size, status.st_mtime)
        return None

    def walk(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield every object with a key below ``prefix``; not all that are deleted meanwhile."""
        above, slash, _ = prefix.rpartition("/")
        if above and not is_key(above):
            return
        parents, _ = _names(above + slash)
        with os_errors("list", self.url, prefix), _absent_is_fine():
            yield from _walk(self.directory(*parents), above + slash, prefix)

    # -- writing

    def write(self, key: str, data: Buffer, *, create: bool = False) -> None:
        """Write or replace the object, atomically; bytes and name have reached the disk then.

        With ``create`` exactly one of several writers wins.

        Raises:
            PreconditionError: with ``create``, the object exists; it was left alone.
        """
        with self.staged(key, data, durable=True) as staged:
            try:
                self.place(staged, key, create=create)
            except FileExistsError:
                problem = "already exists"
                raise PreconditionError(problem, op="put", store=self.url, key=key) from None
            parents, _ = _names(key)
            for depth in range(len(parents), -1, -1):  # those above may be new
                directory = self.directory(*parents[:depth])
                os.fsync(directory.fd)  # fdatasync need not: a directory's size counts no names

    def delete(self, key: str) -> None:
        """Remove the object, if there is one."""
        check_key(key)
        parents, name = _names(key)
        with os_errors("delete", self.url, key), _absent_is_fine():
            directory = self.directory(*parents)
            os.unlink(name, dir_fd=directory.fd)

    def move(self, key: str, target: Directory, name: str) -> None:
        """Move the object to another directory, in which it is called ``name``."""
        parents, file = _names(key)
        directory = self.directory(*parents)
        os.replace(file, name, src_dir_fd=directory.fd, dst_dir_fd=target.fd)

    @contextlib.contextmanager
    def staged(self, key: str, data: Buffer, *, durable: bool) -> Iterator[Staged]:
        """Write ``data`` to a staged file, for the block to move or remove.

        With ``durable`` the bytes have reached the disk. If the block fails nothing is left.
        """
        check_key(key)
        with os_errors("put", self.url, key):
            directory, name = self.directory("staging", make=True), secrets.token_hex(8)
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

    def place(self, staged: Staged, key: str, *, create: bool = False) -> None:
        """Move a staged file to its place; with ``create``, the object must not exist."""
        parents, name = _names(key)
        source, directory = staged.directory, self.directory(*parents, make=True)
        # Unlike rename, link refuses an existing name, on NFS too.
        move = os.link if create else os.replace
        move(staged.name, name, src_dir_fd=source.fd, dst_dir_fd=directory.fd)
        if create:
            os.unlink(staged.name, dir_fd=source.fd)

    def sweep(self) -> None:
        """Remove what killed writers left in staging."""
        with os_errors("sweep", self.url), _absent_is_fine():
            directory = self.directory("staging")
            with directory.scan() as entries:
                for entry in entries:
                    with _absent_is_fine():
                        changed = entry.stat(follow_symlinks=False).st_mtime
                        if time.time() - changed > _SWEPT_AFTER_S:
                            os.unlink(entry.name, dir_fd=directory.fd)


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
    return ["objects", *(f"{parent}+" for parent in parents)], name


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
                    status = os.stat(name, dir_fd=directory.fd, follow_symlinks=False)
                    if _is_object(status):
                        yield ObjectInfo(key, status.st_size, status.st_mtime)


def _is_object(status: os.stat_result) -> bool:
    """Return whether it is a file of ours: one that another user planted is no object."""
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


@contextlib.contextmanager
def _absent_is_fine() -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        if exc.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):  # a link is no object
            raise


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

        try:
            self._files = self._executor.call(lambda: ObjectFiles(root, create=create))
        except BaseException:
            self._executor.release()
            raise

    @property
    def url(self) -> str:
        return self._files.url

    async def get(self, key: str, accept_size: AcceptSize | None = None) -> Any:
        if accept_size is None:
            return await self._call(lambda: self._files.read(key))
        while (info := await self.head(key)) is not None:
            size = info.size
            if not accept_size(size):
                return NotAccepted(size)
            data = await self._call(partial(self._files.read, key, 0, size + 1), size=size)
            if data is None or len(data) <= size:  # else a larger one has taken its place
                return data
        return None

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
        write = partial(self._files.write, key, data, create=mode == "create")
        await self._call(write, size=memoryview(data).nbytes)

    async def delete(self, key: str) -> None:
        await self._call(lambda: self._files.delete(key))

    async def list_page(
        self, prefix: str, after: str | None = None
    ) -> tuple[Sequence[ObjectInfo], str | None]:
        return await self._call(lambda: list(self._files.walk(prefix))), None

    async def aclose(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._executor.release()

    async def _call(self, work: Callable[[], _T], *, size: int = 0) -> _T:
        """Return what ``work`` does on another thread, within the store's time limit."""
        more_s = (_TIMES_AS_LONG - 1) * self._executor.limit_s
        more_s += min(size / _BYTES_A_SECOND, _MAX_TRANSFER_S)
        return await asyncio.to_thread(self._executor.call, work, more_s=more_s)
