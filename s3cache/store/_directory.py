"""Directories that are held open by descriptor, so that renaming them leads nowhere else.

A directory is checked when it is opened, as are those above it, so work in it by its descriptor
(``openat`` and its kin) happens where no other user may write, also after it is renamed or replaced
by a symbolic link.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator, Mapping

from s3cache.errors import (
    AccessDeniedError,
    ConfigError,
    MissingContainerError,
    NoSpaceError,
    PermanentError,
    ReadOnlyError,
    StoreError,
    TransientError,
)
from s3cache.util.threads import close_unshared, open_unshared

_OS_ERRORS: Mapping[type[StoreError], str] = {
    NoSpaceError: "ENOSPC EDQUOT EFBIG",
    ReadOnlyError: "EROFS",
    AccessDeniedError: "EACCES EPERM",
    MissingContainerError: "ENOENT ENOTDIR",
    TransientError: "EIO EAGAIN EBUSY EMFILE ENFILE ENOLCK ESTALE ETIMEDOUT",
}


@contextlib.contextmanager
def os_errors(op: str, where: str, key: str = "") -> Iterator[None]:
    """Turn any ``OSError`` of the block into the :class:`StoreError` that fits its ``errno``."""
    try:
        yield
    except OSError as exc:
        name = errno.errorcode.get(exc.errno or 0)
        kinds = (kind for kind, names in _OS_ERRORS.items() if name in names.split())
        message = exc.strerror or str(exc)
        if exc.filename:
            message += f" ({exc.filename!r})"
        raise next(kinds, PermanentError)(message, op=op, store=where, key=key) from exc


_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# A link, a directory, a pipe or socket that nothing listens at.
_NO_FILE = frozenset({errno.ELOOP, errno.EISDIR, errno.ENXIO})


class Directory:
    """An open directory that only its owner, us, can write in; closed with its last reference.

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
        directory = cls._open(path, path, None, make)
        for above, status in _steps(os.path.dirname(os.path.realpath(path))):
            mode = stat.S_IMODE(status.st_mode)
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
                    _check(status, path)
            raise
        directory = cls(fd, path)
        _check(os.fstat(fd), path)
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

        Anything planted under its name, while others could write in the directory, is removed: a
        link or a second name would lead our writes elsewhere, and the owner of another user's file
        may change it. So ``flags`` must not have ``O_TRUNC``.

        Raises:
            OSError: it cannot be opened; or it was planted, and cannot be removed.
        """
        while True:
            try:
                fd = open_unshared(name, flags, dir_fd=self.fd)
            except OSError as exc:
                if exc.errno not in _NO_FILE:
                    raise
            else:
                status = os.fstat(fd)
                is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
                if is_ours and status.st_nlink <= 1:  # 0: it was just removed
                    return fd
                close_unshared(fd)
            try:
                os.unlink(name, dir_fd=self.fd)
            except FileNotFoundError:
                pass
            except (IsADirectoryError, PermissionError):  # which of them, depends on the system
                os.rmdir(name, dir_fd=self.fd)

    def try_lock(self, name: str) -> int | None:
        """Open and lock a private file, made if missing; return None if another process has it.

        ``close_unshared`` unlocks it.
        """
        fd = self.open_private(name, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink:
                return fd
        except BlockingIOError:
            pass
        except BaseException:
            close_unshared(fd)
            raise
        close_unshared(fd)  # locked, or removed meanwhile: others use a new one
        return None


def _check(status: os.stat_result, path: str) -> None:
    problem = fix = ""
    if stat.S_ISLNK(status.st_mode):
        problem, fix = "is a symbolic link", "give the directory it points to"
    elif not stat.S_ISDIR(status.st_mode):
        problem, fix = "is no directory", "remove the file or give another path"
    elif status.st_uid != os.geteuid():
        problem = f"belongs to user id {status.st_uid}, not to {os.geteuid()}"
        fix = "give a directory of your own"
    elif is_writable_by_others(status):
        problem = f"can be written by others (mode {stat.S_IMODE(status.st_mode):04o})"
        fix = f"run: chmod go-w {path}"
    if problem:
        raise ConfigError(f"directory {path}", problem, fix)


def is_writable_by_others(status: os.stat_result) -> bool:
    """Return whether users other than the owner may write there: others, or a group with members.

    A user's private group (the default of useradd, which goes with umask 002) has that user's
    number and no other members.
    """
    if status.st_mode & stat.S_IWOTH:
        return True
    if not status.st_mode & stat.S_IWGRP or status.st_gid != status.st_uid:
        return bool(status.st_mode & stat.S_IWGRP)
    import grp  # rarely needed: few directories may be written by a group
    import pwd

    members, owner = [], None
    with contextlib.suppress(KeyError):  # a number without a name is the user's alone
        members = grp.getgrgid(status.st_gid).gr_mem
        owner = pwd.getpwuid(status.st_uid).pw_name
    return any(member != owner for member in members)


def make_parents(path: str) -> None:
    """Make the missing directories above ``path``, never writable by others."""
    above = os.path.dirname(path)
    if not os.path.isdir(above):
        make_parents(above)
        with contextlib.suppress(FileExistsError):
            os.mkdir(above, 0o755)


def check_way(path: str) -> None:
    """Check that no other user could exchange ``path``, for code that works by names.

    A user who owns a directory or may write to it may rename what is in it (with the sticky bit,
    only files of their own); the owner of a symbolic link may replace it where they may write.

    Raises:
        ConfigError: a directory or link on the way to ``path`` belongs neither to us nor to root,
            or others may write to such a directory, and it has no sticky bit.
        OSError: a directory above it is missing.
    """
    # The owner of "/" controls every path. Where a container does not map root, that is not user 0.
    owners = {os.geteuid(), 0, os.lstat("/").st_uid}
    above = os.path.dirname(os.path.join(os.getcwd(), path.rstrip("/")))
    os.stat(above)  # fails where links lead in circles
    for at, status in _steps(above):
        mode = status.st_mode
        problem = fix = ""
        if status.st_uid not in owners:
            problem = f"belongs to user id {status.st_uid}"
            fix = "give a directory that lies in none of theirs"
        elif stat.S_ISDIR(mode) and not mode & stat.S_ISVTX and is_writable_by_others(status):
            problem = f"can be written by others (mode {stat.S_IMODE(mode):04o})"
            fix = f"run: chmod go-w {at}, or chmod +t {at}"
        if problem:
            raise ConfigError(
                f"directory {path}", f"could be exchanged: {at} on the way to it {problem}", fix
            )


def _steps(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield each directory on the way to what is at ``path``, from the root, and each link."""
    above = os.path.dirname(path)
    if above != path:
        yield from _steps(above)
    status = os.lstat(path)
    yield path, status
    if stat.S_ISLNK(status.st_mode):
        yield from _steps(os.path.join(above, os.readlink(path)))


def private_directory() -> tuple[str, Callable[[], None]]:
    """Make a directory that no other user can replace; return its path and what removes it.

    It is below the temporary directory where that is safe, else in the next best place.

    Raises:
        ConfigError, OSError: there is no such place.
    """
    import tempfile

    problem: Exception | None = None
    for place in (None, os.path.expanduser("~"), "/tmp", "/var/tmp"):  # noqa: S108 - looked at
        made = None
        try:
            made = tempfile.TemporaryDirectory(prefix="s3cache-", dir=place)
            path = os.path.realpath(made.name)
            check_way(path)
            Directory.at(path)
            return path, made.cleanup
        except (ConfigError, OSError) as exc:
            if made is not None:
                made.cleanup()
            problem = problem or exc
    assert problem is not None
    raise problem
