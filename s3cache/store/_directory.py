"""Directories that are held open by descriptor, so that renaming them leads nowhere else.

A directory was checked when it was opened, as were those it was come by, so what is done in it by
its descriptor (``openat`` and its kin) is done where no other user may write: a directory that is
renamed, or replaced by a symbolic link, does not lead elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import tempfile
from collections.abc import Callable, Iterator

from s3cache._forks import close_unshared, open_unshared
from s3cache.errors import ConfigError

__all__ = [
    "Directory",
    "check_way",
    "is_writable_by_others",
    "make_parents",
    "private_directory",
]

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# A link, a directory, a pipe or socket that nothing listens at.
_NO_FILE = frozenset({errno.ELOOP, errno.EISDIR, errno.ENXIO})


class Directory:
    """An open directory that only its owner, us, can write in; closed with its last user.

    Who uses ``fd`` holds the object until the call has returned.
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
        """The directory at ``path``, made with mode 0700 if it is missing.

        Raises:
            ConfigError: it is a symbolic link, no directory, another user's, or writable by
                others; or anybody may rename what is in a directory above it.
        """
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
        try:
            fd = os.open(path, _FLAGS)
        except OSError as exc:
            if exc.errno in (errno.ELOOP, errno.ENOTDIR):
                _check(os.lstat(path), path)
            raise
        directory = cls(fd, path)
        _check(os.fstat(fd), path)
        _check_above(path)
        return directory

    def enter(self, name: str, *, make: bool = False) -> Directory:
        """The directory called ``name`` in this one, made with mode 0700 if it is missing.

        Raises:
            ConfigError: it is a symbolic link, another user's, or writable by others.
        """
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self.fd)
        path = f"{self.path}/{name}"
        try:
            fd = os.open(name, _FLAGS, dir_fd=self.fd)
        except OSError as exc:
            if exc.errno in (errno.ELOOP, errno.ENOTDIR):
                status = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
                if stat.S_ISLNK(status.st_mode) or make:
                    _check(status, path)
            raise
        directory = Directory(fd, path)
        _check(os.fstat(fd), path)
        return directory

    @contextlib.contextmanager
    def scan(self) -> Iterator[Iterator[os.DirEntry[str]]]:
        """What is in it, for the block.

        Through a descriptor of its own: who reads a directory moves a place in it that all users
        of one descriptor share, and two that read at once would get a part each.
        """
        fd = os.open(".", _FLAGS, dir_fd=self.fd)
        try:
            with os.scandir(fd) as entries:
                yield entries
        finally:
            os.close(fd)

    def names(self) -> list[str]:
        """The names of all that is in it."""
        with self.scan() as entries:
            return [entry.name for entry in entries]

    def open_private(self, name: str, flags: int) -> int:
        """Open a file that only this user's caches write; ``close_unshared`` closes it.

        What others planted, while they could write in the directory, is removed: a link would lead
        our writes elsewhere, so would another name of a file that is not ours to change, and a file
        of another user is theirs to change. So ``flags`` must not have ``O_TRUNC``.

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
                if is_ours and status.st_nlink <= 1:  # none: who removed it has reasons
                    return fd
                close_unshared(fd)
            try:
                os.unlink(name, dir_fd=self.fd)
            except FileNotFoundError:
                pass
            except (IsADirectoryError, PermissionError):  # which of them, depends on the system
                os.rmdir(name, dir_fd=self.fd)

    def flush(self) -> None:
        """Have the names in it reach the disk."""
        os.fsync(self.fd)  # fdatasync need not: names are not what a directory's size counts

    def is_removed(self) -> bool:
        """Whether it has no name any more: nothing can be made in it."""
        return not os.fstat(self.fd).st_nlink


def is_writable_by_others(status: os.stat_result) -> bool:
    """Return whether anybody but the owner may write there: others, or a group with members.

    A user's private group (the default of useradd, which goes with umask 002) has that user's
    number and no other members.
    """
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _is_private_group(status)


def _is_private_group(status: os.stat_result) -> bool:
    if status.st_gid != status.st_uid:
        return False
    import grp  # rarely needed: few directories may be written by a group

    try:
        members = grp.getgrgid(status.st_gid).gr_mem
    except KeyError:
        return True  # the number is the user's alone
    return all(member == _name_of(status.st_uid) for member in members)


def _name_of(user: int) -> str | None:
    import pwd

    with contextlib.suppress(KeyError):
        return pwd.getpwuid(user).pw_name
    return None


def make_parents(path: str) -> None:
    """Make the directories that ``path`` is to lie in, which others may never write."""
    missing = itertools.takewhile(lambda above: not os.path.isdir(above), _above(path))
    for above in reversed(list(missing)):
        with contextlib.suppress(FileExistsError):
            os.mkdir(above, 0o755)


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


def _check_above(path: str) -> None:
    for above in _above(os.path.realpath(path)):
        mode = os.lstat(above).st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise ConfigError(
                f"directory {path}",
                f"lies in {above}, in which anybody may rename it (mode {stat.S_IMODE(mode):04o})",
                f"run: chmod o-w {above}, or chmod +t {above}",
            )


def check_way(path: str) -> None:
    """Refuse a path that others could lead elsewhere, for code that works by names.

    A user who owns a directory or may write to it may rename what is in it (with the sticky bit,
    only files of their own); the owner of a symbolic link may replace it where they may write.

    Raises:
        ConfigError: a directory or link on the way to ``path`` belongs neither to us nor to root,
            or others may write to such a directory, and it has no sticky bit.
        OSError: what it is to lie in is not there.
    """
    # Whoever owns "/" leads every path. Where a container does not map root, that is not user 0.
    owners = {os.geteuid(), 0, os.lstat("/").st_uid}
    for each, status in _way(os.path.join(os.getcwd(), path)):
        mode = stat.S_IMODE(status.st_mode)
        problem = fix = ""
        if status.st_uid not in owners:
            problem = f"belongs to user id {status.st_uid}"
            fix = "give a directory that lies in none of theirs"
        elif (
            stat.S_ISDIR(status.st_mode)
            and not mode & stat.S_ISVTX
            and is_writable_by_others(status)
        ):
            problem = f"can be written by others (mode {mode:04o})"
            fix = f"run: chmod go-w {each}, or chmod +t {each}"
        if problem:
            raise ConfigError(
                f"directory {path}", f"could be exchanged: {each} on the way to it {problem}", fix
            )


# As Linux has it; who makes a longer chain wants no answer.
_MAX_LINKS = 40


def _way(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """Each directory that ``path`` is found in, from the root, and each link that is followed."""
    rest, at, links = path.rstrip("/").split("/")[::-1], "/", 0
    yield at, os.lstat(at)
    while rest:
        name = rest.pop()
        if name in ("", "."):
            continue
        if name == "..":
            at = os.path.dirname(at)
            continue
        if not rest:
            return  # the caller opens and checks it
        inner = os.path.join(at, name)
        status = os.lstat(inner)
        if stat.S_ISLNK(status.st_mode):
            if (links := links + 1) > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
            target = os.readlink(inner)
            at = "/" if target.startswith("/") else at
            rest.extend(target.split("/")[::-1])
        else:
            at = inner
        yield inner, status


def private_directory() -> tuple[str, Callable[[], None]]:
    """Make a directory for this process alone that no other user can replace; and what removes it.

    In the temporary one where that is safe, and else in the next best place.

    Raises:
        ConfigError: there is no such place.
        OSError: as above.
    """
    problem: Exception | None = None
    for place in (None, os.path.expanduser("~"), "/tmp", "/var/tmp"):  # noqa: S108 - looked at
        try:
            made = tempfile.TemporaryDirectory(prefix="s3cache-", dir=place)
        except OSError as exc:
            problem = problem or exc
            continue
        try:
            path = os.path.realpath(made.name)
            check_way(path)
            Directory.at(path)
        except (ConfigError, OSError) as exc:
            made.cleanup()
            problem = problem or exc
        else:
            return path, made.cleanup
    assert problem is not None
    raise problem


def _above(path: str) -> Iterator[str]:
    """The directories that ``path`` lies in, the innermost first."""
    while (above := os.path.dirname(path)) != path:
        yield above
        path = above
