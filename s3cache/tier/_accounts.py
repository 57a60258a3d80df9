"""Exact accounts of a directory that many processes change and any of them may be killed.

The file ``usage`` holds one record of :data:`_RECORD` layout (little-endian)::

    magic[8]  bytes:i64  files:i64  old_size:i64  name_len:u16  crc32:u32  name[name_len]

``name`` is empty, or names the object that is being changed, with ``old_size`` its size before
(-1: it was not there). Settling means: look at what is there now, book the difference, clear the
name. A writer settles after its change; if it was killed, the next one to take the lock does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from s3cache.errors import TransientError
from s3cache.store._directory import Directory
from s3cache.tier._forked import close_in_children, closed

__all__ = ["Accounts", "Books", "Usage"]

_RECORD = struct.Struct("<8sqqqHI")
_MAGIC = b"s3cuse1\n"
_MAX_RECORD = 2048
_ABSENT = -1
_LOCK_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Usage:
    """What a directory holds: bytes of all objects together, and how many there are."""

    bytes: int
    files: int


class Accounts:
    """The accounts of one directory."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._path = os.path.join(directory.root, "usage")

    @contextlib.contextmanager
    def locked(self) -> Iterator[Books]:
        """The settled books, for the only thread of the only process that has them now.

        Raises:
            TransientError: somebody held the lock for :data:`_LOCK_TIMEOUT_S`.
            OSError: the file cannot be opened or written.
        """
        fd = close_in_children(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        try:
            self._lock(fd)
            try:
                books = Books(self._directory, fd)
                books.load()
                yield books
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)
        finally:
            closed(fd)

    def _lock(self, fd: int) -> None:
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        pause_s = 0.0001
        while True:
            try:
                return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TransientError(
                        f"another process has held {self._path} for {_LOCK_TIMEOUT_S:g} s",
                        op="lock",
                        store=self._directory.url,
                    ) from None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.005)


class Books:
    """Bytes and files held, while the lock is; every change goes through :meth:`changing`."""

    def __init__(self, directory: Directory, fd: int) -> None:
        self._directory = directory
        self._fd = fd
        self.bytes = 0
        self.files = 0

    def load(self) -> None:
        """Read the record and settle what a killed writer left; count anew if there is none."""
        data = os.pread(self._fd, _MAX_RECORD, 0)
        record = _parse(data)
        if record is None:
            found = list(self._directory.walk())
            self.set(sum(info.size for info in found), len(found))
            return
        self.bytes, self.files, name, old_size = record
        if name:
            self._settle(name, old_size)

    def set(self, size: int, files: int) -> None:
        """Book what a full count with the lock held has found."""
        self.bytes, self.files = size, files
        self._store("", _ABSENT)

    @contextlib.contextmanager
    def changing(self, name: str) -> Iterator[None]:
        """Announce that the block changes object ``name``; book what it did, even if it failed."""
        old_size = self._size_of(name)
        self._store(name, old_size)
        try:
            yield
        finally:
            self._settle(name, old_size)

    def growth(self, name: str, size: int) -> Usage:
        """What would be added by object ``name`` becoming ``size`` bytes long."""
        old_size = self._size_of(name)
        return Usage(size, 1) if old_size == _ABSENT else Usage(size - old_size, 0)

    def _settle(self, name: str, old_size: int) -> None:
        size = self._size_of(name)
        self.bytes += max(size, 0) - max(old_size, 0)
        self.files += int(size != _ABSENT) - int(old_size != _ABSENT)
        self._store("", _ABSENT)

    def _size_of(self, name: str) -> int:
        info = self._directory.stat(name)
        return _ABSENT if info is None else info.size

    def _store(self, name: str, old_size: int) -> None:
        text = name.encode()
        fields = (self.bytes, self.files, old_size, len(text))
        crc = zlib.crc32(repr(fields).encode() + text)
        os.pwrite(self._fd, _RECORD.pack(_MAGIC, *fields, crc) + text, 0)


def _parse(data: bytes) -> tuple[int, int, str, int] | None:
    """(bytes, files, name, old size), or ``None`` for a record that is absent or torn."""
    if len(data) < _RECORD.size:
        return None
    magic, size, files, old_size, name_len, crc = _RECORD.unpack_from(data)
    text = data[_RECORD.size : _RECORD.size + name_len]
    fields = (size, files, old_size, name_len)
    if magic != _MAGIC or crc != zlib.crc32(repr(fields).encode() + text):
        return None
    return size, files, text.decode(), old_size
