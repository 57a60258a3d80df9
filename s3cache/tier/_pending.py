"""Pending uploads: they survive their process, and exactly one other takes them over.

Each process has a directory ``pending/<owner>/`` and holds a lock on the file ``.lock`` in it for
as long as it lives. Each other file there is one pending upload. Its name is the object's,
percent-encoded (255 bytes at most), so that it never begins with a dot. It is empty, or holds a
note on how the object is to be uploaded and a line feed. A process that gets the lock of another
directory knows that its owner is gone, and moves the files to its own.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from urllib.parse import quote, unquote

from s3cache.errors import ClosedError, ConfigError
from s3cache.store import Directory
from s3cache.util.forks import call_in_child, close_unshared

__all__ = ["Pending"]

_LOCK = ".lock"
_END = b"\n"
# In the place of a note that was cut off: no uploader accepts it.
_CUT = b"a note that was cut off"
_MAX_NOTE_BYTES = 64 << 10
# Opening a pipe does not wait for a writer.
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
# A new owner locks its directory right after making it; one without a lock file is left alone for
# that long.
_GRACE_S = 60.0
# What was planted in the place of a lock can be neither opened nor removed.
_NOT_OURS = frozenset({errno.EACCES, errno.EPERM, errno.ENOTEMPTY, errno.EEXIST})


@dataclass(frozen=True, slots=True)
class _Owner:
    name: str
    directory: Directory
    lock_fd: int


class Pending:
    """The pending uploads below one directory.

    Every method may raise ``OSError``, and those that add some ``ClosedError``.

    Args:
        open_root: gives the directory; makes it if it is missing and the argument says so.
        note: kept with each upload added here, for the process that takes it over.
    """

    def __init__(self, open_root: Callable[[bool], Directory], note: bytes = b"") -> None:
        self.note = note
        self._open_root = open_root
        self._mutex = threading.Lock()
        self._owner: _Owner | None = None
        self._is_closed = False
        call_in_child(self._forget)

    def add(self, name: str) -> bool:
        """Add ``name`` to what this process uploads; return False if it was there."""
        directory = self._own().directory
        known = self.note_of(name)
        if known == self.note:
            return False
        # The note is complete, also after a power failure: without it the object would be uploaded
        # in a way that its saver did not want. If ``name`` was adopted, the last save decides.
        staged = f".{secrets.token_hex(8)}"
        fd = os.open(staged, _CREATE, 0o600, dir_fd=directory.fd)
        try:
            if self.note:
                os.write(fd, self.note + _END)
                os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(staged, _file_of(name), src_dir_fd=directory.fd, dst_dir_fd=directory.fd)
        return known is None

    def note_of(self, name: str) -> bytes | None:
        """Return the note on our upload of ``name``; ``None`` if it is not pending here."""
        owner = self._owner
        if owner is None:
            return None
        try:
            fd = os.open(_file_of(name), _READ, dir_fd=owner.directory.fd)
        except FileNotFoundError:
            return None
        except OSError as exc:
            if exc.errno not in (errno.ELOOP, errno.ENXIO):  # a link, a socket
                raise
            return None
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return None
            text = os.read(fd, _MAX_NOTE_BYTES)
            return _CUT if text and not text.endswith(_END) else text[:-1]
        finally:
            os.close(fd)

    def remove(self, name: str) -> None:
        """Remove our upload of ``name``, if there is one."""
        owner = self._owner
        if owner is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(_file_of(name), dir_fd=owner.directory.fd)

    def mine(self, prefix: str = "") -> list[str]:
        """List the names with ``prefix`` that this process is to upload."""
        owner = self._owner
        return [] if owner is None else list(_names(owner.directory, prefix))

    def all_pending(self) -> set[str]:
        """Return the names that any process, living or dead, is to upload."""
        return {name for _, directory in self._owners() for name in _names(directory, "")}

    def adopt(
        self, prefix: str = "", limit: int | None = None, but: Container[str] = ()
    ) -> list[str]:
        """Take over the uploads of owners that are gone; return the names that became ours.

        Any number of processes may try at once: each upload goes to exactly one of them.

        Args:
            limit: so many at most.
            but: names to leave alone.
        """
        adopted: list[str] = []
        for owner, directory in self._owners():
            own = self._owner
            if own is not None and owner == own.name:
                continue
            lock_fd = self._try_lock(owner, directory)
            if lock_fd is None:
                continue
            try:
                for name in _names(directory, prefix):
                    if limit is not None and len(adopted) >= limit:
                        return adopted
                    if name in but:
                        continue
                    target = self._own().directory
                    try:
                        _move(name, directory, target)
                    except FileNotFoundError:
                        if target.is_removed():
                            raise
                        continue  # it is gone, which is no reason to leave the others
                    adopted.append(name)
                self._remove_if_empty(owner, directory)
            except FileNotFoundError:  # the directory was removed under us
                continue
            except OSError:
                if not adopted:
                    raise
                break  # the caller must learn what became ours
            finally:
                close_unshared(lock_fd)
        return adopted

    def give_back(self, name: str) -> None:
        """Move our upload of ``name``, if there is one, to where another process adopts it."""
        owner = self._owner
        while owner is not None:
            # An owner that does not live: another process may lock its directory, and removes it
            # if that happens before the upload is there.
            other = secrets.token_hex(8)
            directory = self._make(other)
            lock_fd = self._try_lock(other, directory)
            if lock_fd is None:
                continue
            try:
                with contextlib.suppress(FileNotFoundError):
                    _move(name, owner.directory, directory)
                self._remove_if_empty(other, directory)
            finally:
                close_unshared(lock_fd)
            return

    def release(self) -> None:
        """Leave what is not uploaded to other processes."""
        with self._mutex:
            owner, self._owner = self._owner, None
        if owner is not None:
            self._remove_if_empty(owner.name, owner.directory)
            close_unshared(owner.lock_fd)

    def close(self) -> None:
        """Release, for good: an adoption that is under way takes nothing more."""
        with self._mutex:
            self._is_closed = True
        self.release()

    def _own(self) -> _Owner:
        with self._mutex:
            if self._is_closed:
                raise ClosedError("the local tier was closed")
            while self._owner is None:
                name = secrets.token_hex(8)
                directory = self._make(name)
                # An adopter may have taken the lock first and removed the directory: then again.
                lock_fd = self._try_lock(name, directory)
                if lock_fd is not None:
                    self._owner = _Owner(name, directory, lock_fd)
            return self._owner

    def _make(self, owner: str) -> Directory:
        """Make an owner's directory, with a lock that no process holds yet."""
        directory = self._open_root(True).enter(owner, make=True)
        with contextlib.suppress(FileNotFoundError):
            os.close(os.open(_LOCK, os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=directory.fd))
        return directory

    def _owners(self) -> Iterator[tuple[str, Directory]]:
        """Give the directories of owners, and nothing else that lies there."""
        with contextlib.suppress(FileNotFoundError):
            root = self._open_root(False)
            for name in root.names():
                with contextlib.suppress(FileNotFoundError, NotADirectoryError, ConfigError):
                    yield name, root.enter(name)

    def _try_lock(self, owner: str, directory: Directory) -> int | None:
        """Lock the owner's directory; return None if it lives, or is gone or not ready."""
        try:
            fd = directory.open_private(_LOCK, os.O_RDWR)
        except FileNotFoundError:
            with contextlib.suppress(OSError):
                if time.time() - os.fstat(directory.fd).st_mtime > _GRACE_S:
                    self._remove_or_mend(owner, directory)
            return None
        except OSError as exc:
            if exc.errno not in _NOT_OURS:
                raise
            return None
        is_locked = False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            present = os.stat(_LOCK, dir_fd=directory.fd, follow_symlinks=False)
            is_locked = os.path.samestat(present, os.fstat(fd))
        except (BlockingIOError, FileNotFoundError):
            pass
        finally:
            if not is_locked:
                close_unshared(fd)
        return fd if is_locked else None

    def _remove_if_empty(self, owner: str, directory: Directory) -> None:
        """Remove an owner's directory, its lock held, unless uploads are pending in it."""
        with contextlib.suppress(OSError):  # NFS keeps the name of an open file: an adopter can
            present = directory.names()
            if _LOCK in present and all(name[0] == "." for name in present):
                for name in present:
                    os.unlink(name, dir_fd=directory.fd)
                self._remove(owner)

    def _remove_or_mend(self, owner: str, directory: Directory) -> None:
        """Remove a directory that has lost its lock, or give it one if it is not empty.

        If its owner lives, what it uploads is uploaded twice, which does no harm.
        """
        try:
            self._remove(owner)
        except OSError as exc:
            if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            os.close(os.open(_LOCK, _CREATE, 0o600, dir_fd=directory.fd))

    def _remove(self, owner: str) -> None:
        root = self._open_root(False)  # held: its descriptor is closed with it
        os.rmdir(owner, dir_fd=root.fd)

    def _forget(self) -> None:
        # The lock and the uploads stay the parent's.
        self._mutex = threading.Lock()
        self._owner = None


def _file_of(name: str) -> str:
    file = quote(name, safe="")
    return "%2E" + file[1:] if file[:1] == "." else file


def _move(name: str, source: Directory, target: Directory) -> None:
    file = _file_of(name)
    os.replace(file, file, src_dir_fd=source.fd, dst_dir_fd=target.fd)


def _names(directory: Directory, prefix: str) -> Iterator[str]:
    """Give the names of pending uploads; only files are any."""
    files: list[str] = []
    with contextlib.suppress(FileNotFoundError), directory.scan() as entries:
        files = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
    for file in files:
        if file[0] != "." and (name := unquote(file)).startswith(prefix):
            yield name
