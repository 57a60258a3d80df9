"""Files of the tier's root that are no objects: whatever others put under their names gives way."""

from __future__ import annotations

import errno
import os
import stat

from s3cache._forks import close_unshared, open_unshared
from s3cache.store import Directory

__all__ = ["open_own"]

# A link, a directory, a pipe or socket that nobody listens at.
_NO_FILE = frozenset({errno.ELOOP, errno.EISDIR, errno.ENXIO})


def open_own(directory: Directory, name: str, flags: int) -> int:
    """Open a file that nobody but this user's caches write; :func:`close_unshared` closes it.

    What others planted, while they could write in the directory, is removed: a link would lead our
    writes elsewhere, so would another name of a file that is not ours to change, and a file of
    another user is theirs to change. So ``flags`` must not have ``O_TRUNC``.

    Raises:
        OSError: it cannot be opened; or it was planted, and cannot be removed.
    """
    while True:
        try:
            fd = open_unshared(name, flags, dir_fd=directory.fd)
        except OSError as exc:
            if exc.errno not in _NO_FILE:
                raise
        else:
            status = os.fstat(fd)
            is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
            if is_ours and status.st_nlink <= 1:  # none: whoever removed it has reasons
                return fd
            close_unshared(fd)
        try:
            os.unlink(name, dir_fd=directory.fd)
        except FileNotFoundError:
            pass
        except (IsADirectoryError, PermissionError):  # which of them, depends on the system
            os.rmdir(name, dir_fd=directory.fd)
