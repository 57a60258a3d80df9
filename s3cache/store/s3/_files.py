"""Files of others that a client depends on, most of them below ``~/.aws``: read within bounds.

botocore reads whatever is there, to its end, and some of it on the event loop: one that never ends
fills the memory, and a pipe that nobody writes to stops all transfers.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable

from s3cache.errors import ConfigError, StoreError
from s3cache.store._patience import Patience

__all__ = ["check_files", "small_file"]

# Those of people with a profile for each of a thousand accounts are smaller.
_MAX_FILE_BYTES = 4 << 20


def small_file(path: str) -> bytes:
    """All that is in a file that is small by its nature.

    Raises:
        OSError: it cannot be read, or is no file.
        ConfigError: it is large, or its file system hangs.
    """
    patience = Patience.of(os.path.dirname(path))
    try:
        return patience.call(lambda: _read(path))
    except StoreError as exc:
        raise ConfigError(f"file {path}", f"cannot be read: {exc}", "mount it again") from None
    finally:
        patience.release()


def check_files(paths: Iterable[str]) -> None:
    """Look at files, and directories of files, before botocore reads them.

    Raises:
        ConfigError: one of them is large, or what its reader would wait for.
    """
    for path in paths:
        with contextlib.suppress(OSError):  # botocore will say so, if it needs it
            if os.path.isdir(path):
                inside = [os.path.join(path, name) for name in os.listdir(path)]
                check_files(place for place in inside if not os.path.isdir(place))
                continue
            status = os.stat(path)
            if not (stat.S_ISREG(status.st_mode) or os.path.samefile(path, os.devnull)):
                raise ConfigError(
                    f"file {path}", "is no regular file: its reader might wait", "give a file"
                )
            _check_size(path, status)


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe has no writer perhaps
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is no file")
        _check_size(path, status)
        return file.read(_MAX_FILE_BYTES)


def _check_size(path: str, status: os.stat_result) -> None:
    if status.st_size > _MAX_FILE_BYTES:
        raise ConfigError(
            f"file {path}",
            f"has {status.st_size} bytes, more than the {_MAX_FILE_BYTES} that are read",
            "give the right one",
        )
