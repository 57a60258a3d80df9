"""Who is to go next, for all processes that share a directory: whoever looked spares the others.

The file ``usage.victims`` has a line for each, the next one last::

    ["name", bytes, time of last use]

It is a hint: what has changed since stays. A file that cannot be understood is as good as none.
"""

from __future__ import annotations

import contextlib
import json
import os

from s3cache._forks import close_unshared
from s3cache.store import ObjectFiles, ObjectInfo
from s3cache.tier._own import open_own

__all__ = ["Victims"]

_NAME = "usage.victims"
_MAX_LINE = 8_192  # a name has 900 bytes at most, each six in JSON at most


class Victims:
    """The list in the root of ``files``. Used with the accounts locked only."""

    def __init__(self, files: ObjectFiles) -> None:
        self._files = files
        self._unwritten: list[ObjectInfo] = []  # where the disk took no list

    def replace(self, infos: list[ObjectInfo]) -> None:
        """Have the last of ``infos`` go first."""
        lines = (json.dumps([info.key, info.size, info.modified]) + "\n" for info in infos)
        self._unwritten = []
        try:
            fd = self._open(os.O_WRONLY | os.O_CREAT)
            try:
                os.ftruncate(fd, 0)
                data = memoryview("".join(lines).encode())
                while data:
                    data = data[os.write(fd, data) :]
            finally:
                close_unshared(fd)
        except OSError:  # a full disk, which is to get emptier now
            self._unwritten = infos
            with contextlib.suppress(OSError):
                root = self._files.directory()
                os.unlink(_NAME, dir_fd=root.fd)

    def pop(self) -> ObjectInfo | None:
        """The next one, which is taken off the list; ``None`` at its end."""
        if self._unwritten:
            return self._unwritten.pop()
        try:
            fd = self._open(os.O_RDWR)
        except FileNotFoundError:
            return None
        try:
            end = os.fstat(fd).st_size
            start = max(end - _MAX_LINE, 0)
            tail = os.pread(fd, end - start, start)
            line_at = tail.rfind(b"\n", 0, -1) + 1
            info = _parse(tail[line_at:])
            os.ftruncate(fd, start + line_at if info else 0)
            return info
        finally:
            close_unshared(fd)

    def _open(self, flags: int) -> int:
        return open_own(self._files.directory(), _NAME, flags)


def _parse(line: bytes) -> ObjectInfo | None:
    if line[-1:] != b"\n":  # cut off where its writer was killed, or the end of the list
        return None
    try:
        name, size, modified = json.loads(line)
    except ValueError:
        return None
    if not (isinstance(name, str) and isinstance(size, int) and isinstance(modified, float)):
        return None
    return ObjectInfo(name, size, modified)
