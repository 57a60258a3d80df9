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
import threading
import time
import weakref
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from s3cache.errors import TransientError
from s3cache.store._base import ObjectInfo
from s3cache.store._directory import Directory
from s3cache.tier._forked import close_unshared, open_unshared

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
        # Threads of one process queue up here, where waiting costs nothing: for the file's lock one
        # has to ask again and again.
        self._mutex = threading.Lock()
        _instances.add(self)

    @contextlib.contextmanager
    def locked(self) -> Iterator[Books]:
        """The settled books, for the only thread of the only process that has them now.

        Raises:
            TransientError: somebody held the lock for :data:`_LOCK_TIMEOUT_S`.
            OSError: the file cannot be opened or written.
        """
        mutex = self._mutex  # a child forked in the block has another one
        if not mutex.acquire(timeout=_LOCK_TIMEOUT_S):
            raise self._busy("another thread")
        try:
            with self._file_locked() as books:
                yield books
        finally:
            mutex.release()

    def forget(self) -> None:
        """In a forked child: the lock is the parent's, whose thread may hold it."""
        self._mutex = threading.Lock()

    @contextlib.contextmanager
    def _file_locked(self) -> Iterator[Books]:
        fd = self._open_locked()
        try:
            books = Books(self._directory, fd)
            books.load()
            yield books
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)
            close_unshared(fd)

    def _open_locked(self) -> int:
        while True:
            fd = self._open()
            try:
                self._lock(fd)
                if os.fstat(fd).st_nlink:
                    return fd
            except BaseException:
                close_unshared(fd)
                raise
            close_unshared(fd)  # removed while we waited: others use another one by now

    def _open(self) -> int:
        try:
            return open_unshared(self._path, os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:  # the root was removed under us: begin anew
            self._directory.ensure()
            return open_unshared(self._path, os.O_RDWR | os.O_CREAT)

    def _lock(self, fd: int) -> None:
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        pause_s = 0.0001
        while True:
            try:
                return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise self._busy("another process") from None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.005)

    def _busy(self, who: str) -> TransientError:
        return TransientError(
            f"{who} has held {self._path} for {_LOCK_TIMEOUT_S:g} s",
            op="lock",
            store=self._directory.url,
        )


_instances: weakref.WeakSet[Accounts] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for accounts in _instances:
        accounts.forget()


os.register_at_fork(after_in_child=_after_fork_in_child)


class Books:
    """Bytes and files held, while the lock is; every change goes through :meth:`changing`."""

    def __init__(self, directory: Directory, fd: int) -> None:
        self._directory = directory
        self._fd = fd
        self.bytes = 0
        self.files = 0

    @property
    def usage(self) -> Usage:
        return Usage(self.bytes, self.files)

    def load(self) -> None:
        """Read the record and settle what a killed writer left; count anew if there is none."""
        record = _parse(os.pread(self._fd, _MAX_RECORD, 0))
        if record is None:
            self.count()
            return
        self.bytes, self.files, name, before = record
        if name:
            self._settle(name, before, self.size_of(name))

    def count(self) -> list[ObjectInfo]:
        """Book what is there now, whatever was booked before; returns it."""
        found = list(self._directory.walk())
        self.bytes, self.files = sum(info.size for info in found), len(found)
        self._store("", None)
        return found

    @contextlib.contextmanager
    def changing(self, name: str, before: int | None, after: int | None) -> Iterator[None]:
        """Announce that the block changes the size of object ``name``, and book it.

        ``None`` is the size of an object that is not there. Where the block fails, what it did is
        looked up and booked.
        """
        self._store(name, before)
        try:
            yield
        except BaseException:
            self._settle(name, before, self.size_of(name))
            raise
        self._settle(name, before, after)

    def size_of(self, name: str) -> int | None:
        """Bytes of object ``name``, or ``None``: it is not there."""
        info = self._directory.stat(name)
        return None if info is None else info.size

    def _settle(self, name: str, before: int | None, after: int | None) -> None:
        self.bytes += (after or 0) - (before or 0)
        self.files += (after is not None) - (before is not None)
        self._store("", None)

    def _store(self, name: str, before: int | None) -> None:
        text = name.encode()
        fields = (self.bytes, self.files, _ABSENT if before is None else before, len(text))
        crc = zlib.crc32(repr(fields).encode() + text)
        os.pwrite(self._fd, _RECORD.pack(_MAGIC, *fields, crc) + text, 0)


def _parse(data: bytes) -> tuple[int, int, str, int | None] | None:
    """(bytes, files, name, size before); ``None`` for a record that is absent, torn or absurd."""
    if len(data) < _RECORD.size:
        return None
    magic, size, files, before, name_len, crc = _RECORD.unpack_from(data)
    text = data[_RECORD.size : _RECORD.size + name_len]
    fields = (size, files, before, name_len)
    if magic != _MAGIC or crc != zlib.crc32(repr(fields).encode() + text):
        return None
    if size < 0 or files < 0:  # more went than was booked: somebody added files by hand
        return None
    return size, files, text.decode(), None if before == _ABSENT else before
