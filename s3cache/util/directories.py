"""Directories that no other user can write to or replace, for code that opens files by name."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator

from s3cache.errors import ConfigError


def is_writable_by_others(status: os.stat_result) -> bool:
    """Return whether users other than the owner may write: others, or a group with members.

    A user's private group (the default of useradd, with umask 002) has the user's number and no
    other members.
    """
    if status.st_mode & stat.S_IWOTH or not status.st_mode & stat.S_IWGRP:
        return bool(status.st_mode & stat.S_IWOTH)
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
    """Check that files in the open directory ``fd``, which is at ``path``, are this user's alone.

    Raises:
        ConfigError: one is not; ``fix`` says what to do.
    """
    for name in names:
        status = os.stat(name, dir_fd=fd, follow_symlinks=False)
        is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        if not is_ours or is_writable_by_others(status):
            raise ConfigError(f"{path}/{name}", "is not this user's alone", fix)


def private_directory() -> tuple[str, Callable[[], None]]:
    """Create a directory that no other user can replace; return it and a function to remove it.

    It is below the temporary directory where that is safe, else in the next best place.

    Raises:
        ConfigError, OSError: there is no such place.
    """
    problem: Exception | None = None
    for place in (None, os.path.expanduser("~"), "/tmp", "/var/tmp"):  # noqa: S108 - looked at
        try:
            made = tempfile.TemporaryDirectory(prefix="s3cache-", dir=place)
        except OSError as exc:
            problem = problem or exc
            continue
        path = os.path.realpath(made.name)
        try:
            check_way(path)
            return path, made.cleanup
        except (ConfigError, OSError) as exc:
            made.cleanup()
            problem = problem or exc
    assert problem is not None
    raise problem
