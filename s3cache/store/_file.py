"""Private directories, objects as files below one, and a store of them.

Layout, every name below ``root``::

    objects/<segment>+/.../<segment>    one file an object; "/" in a key makes a directory
    staging/<random>                    being written; renamed into objects/ when complete

A directory's name ends in ``+``, which no key has, so a key may be a prefix of another. Other names
are ignored (NFS creates ``.nfs...`` when an open file is deleted).

Writers never change a visible file: they stage, flush and rename, so readers in any process only
see whole objects. A staged file that is an hour old belongs to a killed writer, and is removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    is_key,
    os_errors,
)
from s3cache.util.threads import DeadlineExecutor, close_unshared, open_unshared

_T = TypeVar("_T")

_SWEPT_AFTER_S = 3_600.0
# Directories with more names are sampled; that of the remotes in a local tier has few.
_MANY_NAMES = 64
# Directories of a root: entries of one remote have 16.
_KEPT_OPEN = 20

# The time limit of a FileStore as a multiple of a local disk's, and the bytes per extra second.
_TIMES_AS_LONG = 3
_BYTES_A_SECOND = 8 << 20
_MAX_TRANSFER_S = 600.0

# -- directories that no other user can write to or replace

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Directory:
    """An open directory that only we, its owner, can write to; closed with its last reference.

    It is checked when it is opened, and used through ``fd``, even after it is renamed or replaced.
    Code that uses ``fd`` keeps a reference until the call has returned.
    """

    __slots__ = ("_status", "fd", "path")

    def __init__(self, fd: int, path: str) -> None:
        self.fd, self.path = fd, path
        self._status = os.fstat(fd)

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError, TypeError):
            os.close(self.fd)

    @classmethod
    def at(cls, path: str, *, make: bool = False) -> Directory:
        """Open the directory at ``path``, made with mode 0700 if missing and ``make`` is set.

        Raises:
            ConfigError: it is a symbolic link, no directory, another user's, or writable by
                others; or others may rename entries of a directory above it.
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
                    f"is in {above}, where any user may rename it (mode {mode:04o})",
                    f"run: chmod o-w {above}, or chmod +t {above}",
                )
        return directory

    def enter(self, *names: str, make: bool = False) -> Directory:
        """Open the directory at ``names`` below this one; with ``make``, create missing ones.

        Raises ConfigError if one is a symbolic link, another user's, or writable by others.
        """
        directory = self
        for name in names:
            directory = self._open(name, f"{directory.path}/{name}", directory.fd, make)
        return directory

    def is_at(self, path: str, above: Directory) -> bool:
        """Return whether ``path`` still leads here; raise ConfigError if others can write here."""
        try:
            status = os.stat(path, dir_fd=above.fd, follow_symlinks=False)
        except OSError:  # opening it will report the error
            return False
        if is_same := os.path.samestat(status, self._status):
            _check_directory(status, self.path)
        return is_same

    @classmethod
    def _open(cls, name: str, path: str, dir_fd: int | None, make: bool) -> Directory:
        try:
            fd = os.open(name, _FLAGS, dir_fd=dir_fd)
        except FileNotFoundError:
            if not make:
                raise
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=dir_fd)
            return cls._open(name, path, dir_fd, make)
        except OSError as exc:
            if exc.errno in (errno.ELOOP, errno.ENOTDIR):
                status = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
                if dir_fd is None or make or stat.S_ISLNK(status.st_mode):
                    _check_directory(status, path)
            raise
        directory = cls(fd, path)
        _check_directory(directory._status, path)
        return directory

    @contextlib.contextmanager
    def scan(self) -> Iterator[Iterator[os.DirEntry[str]]]:
        # Two concurrent readers of one descriptor would each get a part of the entries.
        fd = os.open(".", _FLAGS, dir_fd=self.fd)
        try:
            with os.scandir(fd) as entries:
                yield entries
        finally:
            os.close(fd)

    def names(self) -> list[str]:
        with self.scan() as entries:
            return [entry.name for entry in entries]

    def open_private(self, name: str, flags: int) -> int:
        """Open a file that only this user's caches write; ``close_unshared`` closes it.

        A file that another user planted under this name is removed: its owner could change it, or
        it could redirect our writes. So ``flags`` have no ``O_TRUNC``.
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
        """Open and lock a private file, made if missing; return None if another process has it."""
        fd = self.open_private(name, os.O_RDWR | os.O_CREAT)
        with contextlib.ExitStack() as undo:
            undo.callback(close_unshared, fd)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(fd).st_nlink:  # else it was removed, and others use a new file
                    undo.pop_all()
                    return fd
        return None


def _check_directory(status: os.stat_result, path: str) -> None:
    problem = fix = ""
    if stat.S_ISLNK(status.st_mode):
        problem, fix = "is a symbolic link", "give the directory it points to"
    elif not stat.S_ISDIR(status.st_mode):
        problem, fix = "is not a directory", "remove the file or give another path"
    elif status.st_uid != os.geteuid():
        problem = f"belongs to user id {status.st_uid}, not to {os.geteuid()}"
        fix = "give a directory of your own"
    elif status.st_mode & 0o022 and is_writable_by_others(status):
        problem = f"can be written by others (mode {stat.S_IMODE(status.st_mode):04o})"
        fix = f"run: chmod go-w {path}"
    if problem:
        raise ConfigError(f"directory {path}", problem, fix)


def own_directory(path: str) -> Directory:
    """Open a directory, made if missing; raise ConfigError if another user can replace it."""
    make_parents(os.path.abspath(path))
    check_way(path)  # before it is opened
    return Directory.at(path, make=True)


def is_writable_by_others(status: os.stat_result) -> bool:
    """Return whether users other than the owner may write: others, or a group with members."""
    if status.st_mode & stat.S_IWOTH or not status.st_mode & stat.S_IWGRP:
        return bool(status.st_mode & stat.S_IWOTH)
    # A private group (the default of useradd, with umask 002) has the user's number.
    if status.st_gid != status.st_uid:
        return True
    import grp  # rarely needed: few directories are writable by a group
    import pwd

    try:
        members = grp.getgrgid(status.st_gid).gr_mem
        return members not in ([], [pwd.getpwuid(status.st_uid).pw_name])
    except KeyError:  # a group without a name has no other members
        return False


def make_parents(path: str) -> None:
    """Make the missing directories above ``path``, never writable by others."""
    above = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(above):
        make_parents(above)
        with contextlib.suppress(FileExistsError):
            os.mkdir(above, 0o755)


def check_way(path: str) -> None:
    """Check that no other user can replace ``path``, for code that opens files by name.

    A user who owns a directory or may write to it may rename what is in it (with the sticky bit,
    only files of their own); the owner of a symbolic link may replace it where they may write.

    Raises:
        ConfigError: a directory or link on the way to ``path`` belongs neither to us nor to root,
            or others may write to such a directory, and it has no sticky bit.
        OSError: a directory above it is missing.
    """
    # The owner of "/" controls every path. In a container that does not map root, it is not user 0.
    owners = {os.geteuid(), 0, os.lstat("/").st_uid}
    above = os.path.dirname(os.path.join(os.getcwd(), path.rstrip("/")))
    os.stat(above)  # fails for circular links
    for at, status in _steps(above):
        mode = status.st_mode
        problem = fix = ""
        if status.st_uid not in owners:
            problem = f"belongs to user id {status.st_uid}"
            fix = "give a directory outside of that user's directories"
        elif stat.S_ISDIR(mode) and not mode & stat.S_ISVTX and is_writable_by_others(status):
            problem = f"can be written by others (mode {stat.S_IMODE(mode):04o})"
            fix = f"run: chmod go-w {at}, or chmod +t {at}"
        if problem:
            raise ConfigError(
                f"directory {path}",
                f"could be replaced by other users: {at} on the way to it {problem}",
                fix,
            )


def _steps(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield each directory and link on the way from the root to ``path``."""
    above = os.path.dirname(path)
    if above != path:
        yield from _steps(above)
    status = os.lstat(path)
    yield path, status
    if stat.S_ISLNK(status.st_mode):
        yield from _steps(os.path.join(above, os.readlink(path)))


def check_files(fd: int, path: str, names: Iterable[str], fix: str) -> None:
    """Raise ConfigError, with ``fix``, unless files in a directory are this user's alone."""
    for name in names:
        status = os.stat(name, dir_fd=fd, follow_symlinks=False)
        is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        if not is_ours or is_writable_by_others(status):
            raise ConfigError(f"{path}/{name}", "is not this user's alone", fix)


def private_directory() -> tuple[str, Callable[[], None]]:
    """Create a directory that no other user can replace; return it and a function to remove it.

    It is below the temporary directory where that is safe, else in the next best place. Raises
    ConfigError or OSError if there is none.
    """
    problems: list[Exception] = []
    for place in (None, os.path.expanduser("~"), "/tmp", "/var/tmp"):  # noqa: S108 - looked at
        with contextlib.ExitStack() as undo:
            try:
                temporary = tempfile.TemporaryDirectory(prefix="s3cache-", dir=place)
                undo.callback(temporary.cleanup)
                check_way(path := os.path.realpath(temporary.name))
                return path, undo.pop_all().close
            except (ConfigError, OSError) as exc:
                problems.append(exc)
    raise problems[0]


# -- objects


class ObjectFiles:
    """Objects as files. Synchronous; any number of threads and processes may share ``root``.

    A missing ``root`` is made with mode 0700, and its parents with 0755 at most.

    Raises:
        ConfigError: another user can write to ``root`` or replace it; see :meth:`Directory.at`.
        StoreError: it cannot be created.
    """

    def __init__(self, root: str | os.PathLike[str], *, create: bool = True) -> None:
        self.root = os.path.abspath(os.fspath(root))
        self.url = f"file://{quote(self.root)}"
        self._root: Directory | None = None
        # Shared by threads: replaced, never changed.
        self._opened: dict[tuple[str, ...], Directory] = {}
        with os_errors("open", self.url):
            for name in ("objects", "staging") if create else ():
                self.directory(name, make=True)
            self.directory()
        if create:
            with contextlib.suppress(ReadOnlyError):  # it can still be read
                self.sweep()

    def directory(self, *names: str, make: bool = False) -> Directory:
        """Return the root, or a directory in it. The latest stay open, and are checked again."""
        # The root stays open even if it is moved; if it was removed, open it again.
        root = self._root
        if root is None or not os.fstat(root.fd).st_nlink:
            root = self._root = Directory.at(self.root, make=make)
        if not names:
            return root
        directory = self._opened.get(names)
        if directory is None or not directory.is_at("/".join(names), root):
            directory = root.enter(*names, make=make)
            self._opened = {**dict([*self._opened.items()][1 - _KEPT_OPEN :]), names: directory}
        return directory

    def _place_of(self, key: str, *, make: bool = False) -> tuple[Directory, str]:
        """Return the directory of the object, and the name of its file."""
        return self.directory(*_parents(check_key(key)), make=make), key.rpartition("/")[2]

    # -- reading

    def read(self, key: str, length: int | None = None, *, is_use: bool = False) -> bytes | None:
        """Return the object's bytes, or the first ``length`` of them; None if absent.

        With ``is_use`` the object is marked as used now.
        """
        data = None
        with os_errors("get", self.url, key), _absent_is_fine():
            # Do not wait for the other end of a planted pipe.
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            directory, name = self._place_of(key)
            fd = os.open(name, flags, dir_fd=directory.fd)
            try:
                status = os.fstat(fd)
                if _is_object(status):
                    data, size = b"", status.st_size
                    left = size if length is None else min(length, size)
                    # One read returns at most 2 GiB.
                    while left and (more := os.pread(fd, left, len(data))):
                        data, left = data + more, left - len(more)
                    if is_use:
                        # On a disk that became read-only the bytes are still valid.
                        with contextlib.suppress(OSError):
                            mark_used(fd)
            finally:
                os.close(fd)
        return data

    def stat(self, key: str) -> ObjectInfo | None:
        """Return the object's size and time of last change, or None if absent."""
        with os_errors("head", self.url, key), _absent_is_fine():
            if info := _info(key, *self._place_of(key)):
                return info
        return None

    def walk(self, prefix: str = "", *, one_in: int = 1) -> Iterator[ObjectInfo]:
        """Yield all objects below ``prefix``; sample one in ``one_in`` in large directories."""
        above, slash, _ = prefix.rpartition("/")
        if above and not is_key(above):
            return
        with os_errors("list", self.url, prefix), _absent_is_fine():
            yield from _walk(self.directory(*_parents(prefix)), above + slash, prefix, one_in)

    # -- writing

    def write(self, key: str, data: Buffer, *, create: bool = False) -> None:
        """Write or replace the object, atomically; on return, bytes and name are on the disk.

        With ``create`` exactly one of several writers succeeds; PreconditionError for the others.
        """
        exists = PreconditionError("already exists", op="put", store=self.url, key=key)
        if create and self.stat(key) is not None:  # saves the writing
            raise exists
        with self.staged(key, data, durable=True) as staged:
            try:
                staged.place(create=create)
            except FileExistsError:
                raise exists from None
            way = [self.directory()]
            for name in _parents(key):
                way.append(way[-1].enter(name))
            for directory in reversed(way):  # parents may be new
                os.fsync(directory.fd)  # fdatasync need not write new names

    def delete(self, key: str) -> None:
        """Remove the object, if there is one."""
        with os_errors("delete", self.url, key), _absent_is_fine():
            directory, name = self._place_of(key)
            os.unlink(name, dir_fd=directory.fd)

    @contextlib.contextmanager
    def staged(self, key: str, data: Buffer, *, durable: bool) -> Iterator[Staged]:
        """Write ``data`` to a staged file, for the block to move or remove.

        With ``durable`` the bytes have reached the disk. If the block fails, no file remains.
        """
        check_key(key)
        with os_errors("put", self.url, key):
            directory, name = self.directory("staging", make=True), secrets.token_hex(8)
            target = self._place_of(key, make=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            fd = os.open(name, flags, 0o600, dir_fd=directory.fd)
            staged = Staged(directory, name, fd, *target)
            try:
                view = memoryview(data).cast("B")
                while view:
                    view = view[os.write(staged.fd, view) :]
                if durable:
                    # macOS has no fdatasync
                    (os.fdatasync if hasattr(os, "fdatasync") else os.fsync)(staged.fd)
                yield staged
            except BaseException:
                with contextlib.suppress(OSError):  # moved, or left for sweep()
                    os.unlink(name, dir_fd=directory.fd)
                raise
            finally:
                os.close(staged.fd)

    def sweep(self) -> None:
        """Remove staged files of killed writers."""
        with os_errors("sweep", self.url), _absent_is_fine():
            directory = self.directory("staging")
            for name in directory.names():
                with _absent_is_fine():
                    status = os.stat(name, dir_fd=directory.fd, follow_symlinks=False)
                    if time.time() - status.st_mtime > _SWEPT_AFTER_S:
                        os.unlink(name, dir_fd=directory.fd)


class Staged(NamedTuple):
    """A staged file, and its final place."""

    directory: Directory
    name: str
    fd: int
    target: Directory
    target_name: str

    def replaced_bytes(self) -> int | None:
        """Return the size of the object that it will replace, or None."""
        with contextlib.suppress(FileNotFoundError):
            info = _info("", self.target, self.target_name)
            return info.size if info else None
        return None

    def drop(self) -> None:
        """Remove the staged file, so that an existing object stays."""
        os.unlink(self.name, dir_fd=self.directory.fd)

    def place(self, *, create: bool = False) -> None:
        """Move it to its place; with ``create``, only if no object is there."""
        # Unlike rename, link refuses an existing name, on NFS too.
        move = os.link if create else os.replace
        fds = {"src_dir_fd": self.directory.fd, "dst_dir_fd": self.target.fd}
        move(self.name, self.target_name, **fds)
        if create:
            os.unlink(self.name, dir_fd=self.directory.fd)


def mark_used(fd: int) -> None:
    """Set the file's time of last change to now."""
    # The kernel's own time stamps only advance every few milliseconds.
    now = time.time_ns()
    os.utime(fd, ns=(now, now))


def _parents(key: str) -> list[str]:
    """Return the names of the object's directories below the root."""
    return ["objects", *(f"{parent}+" for parent in key.split("/")[:-1])]


def _walk(directory: Directory, done: str, prefix: str, one_in: int) -> Iterator[ObjectInfo]:
    """Yield objects in a directory, with keys that begin with ``done``; removed ones may lack."""
    with _absent_is_fine():
        names = directory.names()
        if len(names) > _MANY_NAMES:
            names = names[secrets.randbelow(one_in) :: one_in]
        for name in names:
            key = done + (f"{name[:-1]}/" if name.endswith("+") else name)
            with _absent_is_fine(), contextlib.suppress(ConfigError):  # removed, or not ours
                if key.endswith("/") and (key.startswith(prefix) or prefix.startswith(key)):
                    yield from _walk(directory.enter(name), key, prefix, one_in)
                elif key.startswith(prefix) and is_key(key):
                    info = _info(key, directory, name)
                    yield from [info] if info else []


def _info(key: str, directory: Directory, name: str) -> ObjectInfo | None:
    status = os.stat(name, dir_fd=directory.fd, follow_symlinks=False)
    return ObjectInfo(key, status.st_size, status.st_mtime) if _is_object(status) else None


def _is_object(status: os.stat_result) -> bool:
    """Return whether it is a file of this user: another user's planted file is not an object."""
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


@contextlib.contextmanager
def _absent_is_fine() -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        if exc.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):  # a link is not an object
            raise


class FileStore(Store):
    """A store of files below ``root``, which processes on any machines may share.

    So on NFS, EFS or Lustre it is a remote. When ``put`` returns, the object has reached the disk.
    File system calls run on other threads. A call that hangs (a dead NFS server) fails as a
    ``TransientError`` after 15 s, and later calls fail at once, until the file system answers.

    Raises:
        ConfigError: ``root`` is not a private directory of this user.
        StoreError: ``root`` cannot be created, or its file system hangs.
    """

    def __init__(self, root: str | os.PathLike[str], *, create: bool = True) -> None:
        self._executor = DeadlineExecutor.of(os.path.abspath(os.fspath(root)))
        with contextlib.ExitStack() as undo:
            undo.callback(self._executor.release)
            self._files = self._executor.call(lambda: ObjectFiles(root, create=create))
            self._at_close = undo.pop_all()

    @property
    def url(self) -> str:
        return self._files.url

    async def get(self, key: str, accept_size: AcceptSize | None = None) -> Any:
        if accept_size is None:
            return await self._call(lambda: self._files.read(key))
        while (info := await self.head(key)) is not None:
            if not accept_size(info.size):
                return NotAccepted(info.size)
            data = await self.get_range(key, info.size + 1)
            if data is None or len(data) <= info.size:  # else a larger object replaced it
                return data
        return None

    async def get_range(self, key: str, length: int) -> Buffer | None:
        return await self._call(lambda: self._files.read(key, length), size=length)

    async def head(self, key: str) -> ObjectInfo | None:
        return await self._call(lambda: self._files.stat(key))

    async def put(self, key: str, data: Buffer, *, mode: PutMode = "overwrite", **_: Any) -> None:
        write = partial(self._files.write, key, data, create=mode == "create")
        await self._call(write, size=memoryview(data).nbytes)

    async def delete(self, key: str) -> None:
        await self._call(lambda: self._files.delete(key))

    async def list_page(
        self, prefix: str, after: str | None = None
    ) -> tuple[Sequence[ObjectInfo], str | None]:
        return await self._call(lambda: list(self._files.walk(prefix))), None

    async def aclose(self) -> None:
        self._at_close.close()

    async def _call(self, work: Callable[[], _T], *, size: int = 0) -> _T:
        """Run ``work`` on another thread, within the store's time limit; return its result."""
        more_s = (_TIMES_AS_LONG - 1) * self._executor.limit_s
        more_s += min(size / _BYTES_A_SECOND, _MAX_TRANSFER_S)
        return await self._executor.run(work, more_s=more_s)
