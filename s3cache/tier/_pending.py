"""Pending uploads: they survive their process, and exactly one other takes them over.

Each process has a directory ``pending/<owner>/`` and holds a lock on the file ``.lock`` in it for
as long as it lives. Each other file there is one pending upload. Its name is the object's,
percent-encoded (255 bytes at most), so that it never begins with a dot; it holds the note on how
the object is to be uploaded. A process that gets the lock of another directory knows that its owner
is gone, and moves the files to its own.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Callable, Container, Iterator
from typing import NamedTuple
from urllib.parse import quote, unquote

from s3cache.errors import ClosedError, ConfigError
from s3cache.store import Directory
from s3cache.util.threads import call_in_child, close_unshared

__all__ = ["Pending"]

_LOCK = ".lock"
_MAX_NOTE_BYTES = 64 << 10
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class _Owner(NamedTuple):
    name: str
    directory: Directory
    lock_fd: int


class Pending:
    """The pending uploads below the directory that ``open_root`` gives, or makes if asked to.

    Callers of what changes them hold the lock on the tier's objects: no two processes make, move or
    remove anything here at once. ``note`` is kept with each upload added here, for the process that
    takes it over. Every method may raise ``OSError``.
    """

    def __init__(self, open_root: Callable[[bool], Directory], note: bytes = b"") -> None:
        self._open_root = open_root
        self._note = note
        self._owner: _Owner | None = None
        self._adopted: set[str] = set()  # of ours, those that another process saved
        self._is_closed = False
        call_in_child(self.forget)

    def add(self, name: str) -> bool:
        """Add ``name`` to what this process uploads; return False if it was there."""
        known = self.note_of(name)
        if known is None or name in self._adopted:  # of an adopted one, the last save decides
            try:
                self._write_note(name)
            except FileNotFoundError:  # our directory was removed: make another
                self.release()
                self._write_note(name)
            self._adopted.discard(name)
        return known is None

    def _write_note(self, name: str) -> None:
        # The note is complete, also after a power failure: without it the object would be uploaded
        # in a way that its saver did not want.
        directory = self._own().directory
        staged = f".{secrets.token_hex(8)}"
        fd = os.open(staged, _CREATE, 0o600, dir_fd=directory.fd)
        try:
            if self._note:
                os.write(fd, self._note)
                os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(staged, _file_of(name), src_dir_fd=directory.fd, dst_dir_fd=directory.fd)

    def note_of(self, name: str) -> bytes | None:
        """Return the note on our upload of ``name``; ``None`` if it is not pending here."""
        if self._owner is None:
            return None
        flags = os.O_RDONLY | os.O_NONBLOCK  # opening a pipe does not wait for a writer
        try:
            fd = self._owner.directory.open_private(_file_of(name), flags)
        except FileNotFoundError:
            return None
        try:
            return os.read(fd, _MAX_NOTE_BYTES)
        finally:
            close_unshared(fd)

    def is_adopted(self, name: str) -> bool:
        """Return whether another process saved our upload of ``name``."""
        return name in self._adopted

    def remove(self, name: str) -> None:
        """Remove our upload of ``name``, if there is one."""
        if self._owner is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(_file_of(name), dir_fd=self._owner.directory.fd)
            self._adopted.discard(name)

    def mine(self, prefix: str = "") -> list[str]:
        """List the names with ``prefix`` that this process is to upload; takes no lock."""
        owner = self._owner
        return [] if owner is None else _names(owner.directory, prefix)

    def all_pending(self, prefix: str = "") -> set[str]:
        """Return the names with ``prefix`` that any process, living or dead, is to upload."""
        return {name for _, directory in self._owners() for name in _names(directory, prefix)}

    def adopt(
        self, prefix: str = "", limit: int | None = None, but: Container[str] = ()
    ) -> list[str]:
        """Take over up to ``limit`` uploads of owners that are gone; return their names."""
        adopted: list[str] = []
        own = self._owner.name if self._owner is not None else ""
        for owner, directory in self._owners():
            lock_fd = None
            if owner != own:
                with contextlib.suppress(OSError):  # something else was planted in its place
                    lock_fd = directory.try_lock(_LOCK)
            if lock_fd is None:  # its owner lives
                continue
            try:
                for name in _names(directory, prefix):
                    if limit is not None and len(adopted) >= limit:
                        return adopted
                    if name in but:
                        continue
                    if self.note_of(name) is not None and name not in self._adopted:
                        os.unlink(_file_of(name), dir_fd=directory.fd)  # our own save decides
                    else:
                        _move(name, directory, self._own().directory)
                        self._adopted.add(name)
                    adopted.append(name)
                self._remove_if_empty(owner, directory)
            finally:
                close_unshared(lock_fd)
        return adopted

    def give_back(self, name: str) -> None:
        """Move our upload of ``name``, if there is one, to where another process adopts it."""
        if self._owner is not None and self.note_of(name) is not None:
            no_owner = self._open_root(True).enter(secrets.token_hex(8), make=True)
            _move(name, self._owner.directory, no_owner)
            self._adopted.discard(name)

    def close(self) -> None:
        """Add nothing more, and leave what is not uploaded to other processes."""
        self._is_closed = True
        if self._owner is not None:
            self._remove_if_empty(self._owner.name, self._owner.directory)
        self.release()

    def release(self) -> None:
        """Leave what is not uploaded to other processes; takes no lock."""
        owner = self._owner
        self.forget()
        if owner is not None:
            close_unshared(owner.lock_fd)

    def forget(self) -> None:
        """Begin as another owner; in a forked child, lock and uploads stay the parent's."""
        self._owner = None
        self._adopted = set()

    def _own(self) -> _Owner:
        if self._is_closed:
            raise ClosedError("the local tier was closed")
        if self._owner is None:
            name = secrets.token_hex(8)
            directory = self._open_root(True).enter(name, make=True)
            lock_fd = directory.try_lock(_LOCK)
            if lock_fd is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
            self._owner = _Owner(name, directory, lock_fd)
        return self._owner

    def _owners(self) -> Iterator[tuple[str, Directory]]:
        """Give the directories of owners, and nothing else that lies there."""
        with contextlib.suppress(FileNotFoundError):
            root = self._open_root(False)
            for name in root.names():
                with contextlib.suppress(FileNotFoundError, NotADirectoryError, ConfigError):
                    yield name, root.enter(name)

    def _remove_if_empty(self, owner: str, directory: Directory) -> None:
        """Remove an owner's directory, unless uploads are pending in it."""
        present = directory.names()
        if all(name[0] == "." for name in present):
            with contextlib.suppress(OSError):  # NFS keeps the name of an open file: an adopter can
                for name in present:
                    os.unlink(name, dir_fd=directory.fd)
                root = self._open_root(False)  # held: its descriptor is closed with it
                os.rmdir(owner, dir_fd=root.fd)


def _file_of(name: str) -> str:
    file = quote(name, safe="")
    return "%2E" + file[1:] if file[:1] == "." else file


def _move(name: str, source: Directory, target: Directory) -> None:
    file = _file_of(name)
    os.replace(file, file, src_dir_fd=source.fd, dst_dir_fd=target.fd)


def _names(directory: Directory, prefix: str = "") -> list[str]:
    """Return the names of pending uploads; only files are any."""
    with contextlib.suppress(FileNotFoundError), directory.scan() as entries:
        files = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
        names = [unquote(file) for file in files if file[0] != "."]
        return [name for name in names if name.startswith(prefix)]
    return []
