"""Records of pending uploads: they survive their process, and exactly one other claims them.

Each process has a directory ``pending/<owner>/`` and holds a lock on the file ``.lock`` in it for
as long as it lives. One file beside the lock is one record; its name is the object's,
percent-encoded (255 bytes at most), so that it never begins with a dot. In it is a note on how the
object is to be uploaded. Most need none: then it is a link to the object where there can be one,
which spares the file system a file that soon goes again (ext4 without a journal is slow at making
files after many went). Whoever can take the lock of another's directory knows that its owner is
gone, and while holding it moves the records to its own.
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

from s3cache._forks import call_in_child, close_unshared
from s3cache.errors import ClosedError, ConfigError
from s3cache.store import Directory, Staged

__all__ = ["Pending"]

_LOCK = ".lock"
# What a note begins with, and no frame does.
_NOTE = b"s3cache note\n"
# Stands for a note that was cut short: no uploader accepts it.
_CUT = b"a note that was cut short"
_MAX_NOTE_BYTES = 64 << 10
# A pipe is not waited at for somebody to write.
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
# A new owner locks its directory right after making it; a directory without a lock file is left
# alone for that long.
_GRACE_S = 60.0


# What is in the place of a lock cannot be opened, nor removed.
_NOT_OURS = frozenset({errno.EACCES, errno.EPERM, errno.ENOTEMPTY, errno.EEXIST})


@dataclass(frozen=True, slots=True)
class _Owner:
    name: str
    directory: Directory
    fd: int  # of the lock


class Pending:
    """The records below ``root``.

    Every method may raise ``OSError``, and those that make records ``ClosedError``.

    Args:
        open_root: gives the directory at ``root``, made if it is missing and the argument says so.
        note: kept in each record made here, for the process that uploads the object; a link has
            none.
    """

    def __init__(
        self,
        root: str,
        open_root: Callable[[bool], Directory] | None = None,
        note: bytes = b"",
    ) -> None:
        self.root = root
        self.note = note
        self._open_root = open_root or (lambda make: Directory.at(root, make=make))
        self._mutex = threading.Lock()
        self._owner: _Owner | None = None
        self._closed = False
        call_in_child(self._forget)

    def add(self, name: str, file: Staged | str) -> bool:
        """Record ``name`` as ours to upload, with a link to ``file``; return False if it was."""
        owner = self._own().directory
        try:
            try:
                if self.note:
                    self._write_note(owner, _record(name))
                elif isinstance(file, Staged):
                    file.link(owner, _record(name))
                else:
                    os.link(file, _record(name), dst_dir_fd=owner.fd)
            except (FileExistsError, FileNotFoundError):
                raise
            except OSError:  # no links on this file system, or too many
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                os.close(os.open(_record(name), flags, 0o600, dir_fd=owner.fd))
        except FileExistsError:
            if self.note_of(name) != self.note:
                # It was adopted: the last save decides how it is uploaded.
                os.unlink(_record(name), dir_fd=owner.fd)
                self.add(name, file)
            return False
        return True

    def _write_note(self, owner: Directory, record: str) -> None:
        # Complete or not there, also after a power failure: without it the object would go up in
        # a way that its saver did not want.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        staged = f".{secrets.token_hex(8)}"
        fd = os.open(staged, flags, 0o600, dir_fd=owner.fd)
        try:
            os.write(fd, _NOTE + self.note)
            os.fsync(fd)
            os.link(staged, record, src_dir_fd=owner.fd, dst_dir_fd=owner.fd)
        finally:
            os.close(fd)
            os.unlink(staged, dir_fd=owner.fd)

    def note_of(self, name: str) -> bytes | None:
        """Return the note in our record of ``name``: empty if none, ``None`` without a record."""
        owner = self._owner
        if owner is None:
            return None
        try:
            fd = os.open(_record(name), _READ, dir_fd=owner.directory.fd)
        except FileNotFoundError:
            return None
        except OSError as exc:
            if exc.errno not in (errno.ELOOP, errno.ENXIO):  # a link, a socket
                raise
            return None
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return None
            head = os.read(fd, len(_NOTE))
            if head == _NOTE:
                return os.read(fd, _MAX_NOTE_BYTES) or _CUT
            # Else it is a link to the object, or an empty file in the place of one.
            return _CUT if head and _NOTE.startswith(head) else b""
        finally:
            os.close(fd)

    def remove(self, name: str) -> None:
        """Forget our record of ``name``, if there is one."""
        owner = self._owner
        if owner is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(_record(name), dir_fd=owner.directory.fd)

    def mine(self, prefix: str) -> list[str]:
        """List the names with ``prefix`` that this process is to upload."""
        owner = self._owner
        return [] if owner is None else list(_records(owner.directory, prefix))

    def all_pending(self) -> set[str]:
        """Return the names that any process, living or dead, has recorded."""
        return {name for _, directory in self._owners() for name in _records(directory, "")}

    def adopt(self, prefix: str, limit: int | None = None, but: Container[str] = ()) -> list[str]:
        """Take over the records of dead owners; return the names that became ours.

        Any number of processes may try at once: each record goes to exactly one of them.

        Args:
            limit: so many at most.
            but: names to leave alone.
        """
        adopted: list[str] = []
        for owner, directory in self._owners():
            own = self._owner
            if own is not None and owner == own.name:
                continue
            fd = self._try_lock(owner, directory)
            if fd is None:
                continue
            try:
                for name in _records(directory, prefix):
                    if name in but:
                        continue
                    if limit is not None and len(adopted) >= limit:
                        return adopted
                    try:
                        _move(name, directory, (target := self._own().directory))
                    except FileNotFoundError:
                        if target.is_removed():
                            raise
                        continue  # the record is gone, and no reason to leave the others
                    adopted.append(name)
                self._remove_if_empty(owner, directory)
            except FileNotFoundError:  # the directory was removed under us
                continue
            except OSError:
                if not adopted:
                    raise
                break  # the caller must learn what became ours
            finally:
                close_unshared(fd)
        return adopted

    def give_back(self, name: str) -> None:
        """Move our record of ``name``, if there is one, to where another process adopts it."""
        owner = self._owner
        while owner is not None:
            # The directory of an owner that is gone: any process may lock it. One that does before
            # the record is there removes it.
            other = secrets.token_hex(8)
            directory = self._make(other)
            fd = self._try_lock(other, directory)
            if fd is None:
                continue
            try:
                with contextlib.suppress(FileNotFoundError):  # the record is not there
                    _move(name, owner.directory, directory)
                self._remove_if_empty(other, directory)
            finally:
                close_unshared(fd)
            return

    def release(self) -> None:
        """Let the records go: another process may adopt what is left of them."""
        with self._mutex:
            owner, self._owner = self._owner, None
        if owner is not None:
            self._remove_if_empty(owner.name, owner.directory)
            close_unshared(owner.fd)

    def close(self) -> None:
        """Let the records go for good: an adoption under way takes nothing more."""
        with self._mutex:
            self._closed = True
        self.release()

    def _own(self) -> _Owner:
        with self._mutex:
            if self._closed:
                raise ClosedError("the local tier was closed")
            while self._owner is None:
                name = secrets.token_hex(8)
                directory = self._make(name)
                # An adopter may have taken the lock first and removed the directory: then again.
                fd = self._try_lock(name, directory)
                if fd is not None:
                    self._owner = _Owner(name, directory, fd)
            return self._owner

    def _make(self, owner: str) -> Directory:
        """Make an owner's directory, with a lock that no process holds yet."""
        directory = self._open_root(True).enter(owner, make=True)
        with contextlib.suppress(FileNotFoundError):
            flags = os.O_CREAT | os.O_CLOEXEC
            os.close(os.open(_LOCK, flags, 0o600, dir_fd=directory.fd))
        return directory

    def _owners(self) -> Iterator[tuple[str, Directory]]:
        """Give the directories of owners, and nothing else that lies there."""
        with contextlib.suppress(FileNotFoundError):
            root = self._open_root(False)
            for name in root.names():
                with contextlib.suppress(FileNotFoundError, NotADirectoryError, ConfigError):
                    yield name, root.enter(name)

    def _remove_if_empty(self, owner: str, directory: Directory) -> None:
        """Remove an owner's directory, its lock held, unless there are records in it."""
        with contextlib.suppress(OSError):  # NFS keeps the name of an open file: an adopter can
            present = directory.names()
            if _LOCK in present and all(name[0] == "." for name in present):  # and no half note
                for name in present:
                    os.unlink(name, dir_fd=directory.fd)
                self._remove(owner)

    def _remove(self, owner: str) -> None:
        root = self._open_root(False)
        os.rmdir(owner, dir_fd=root.fd)

    def _try_lock(self, owner: str, directory: Directory) -> int | None:
        """Lock the owner's directory, or ``None``: it lives, or it is gone or not ready."""
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
        locked = False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            there = os.stat(_LOCK, dir_fd=directory.fd, follow_symlinks=False)
            locked = os.path.samestat(there, os.fstat(fd))
        except (BlockingIOError, FileNotFoundError):
            pass
        finally:
            if not locked:
                close_unshared(fd)
        return fd if locked else None

    def _remove_or_mend(self, owner: str, directory: Directory) -> None:
        """Remove a directory that has lost its lock, or give it a new one for its records' sake.

        Should its owner live, what it uploads is uploaded twice, which does no harm.
        """
        try:
            self._remove(owner)
        except OSError as exc:
            if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            os.close(os.open(_LOCK, flags, 0o600, dir_fd=directory.fd))

    def _forget(self) -> None:
        # The lock and the records stay the parent's.
        self._mutex = threading.Lock()
        self._owner = None


def _record(name: str) -> str:
    record = quote(name, safe="")
    return "%2E" + record[1:] if record[:1] == "." else record


def _move(name: str, source: Directory, target: Directory) -> None:
    record = _record(name)
    os.replace(record, record, src_dir_fd=source.fd, dst_dir_fd=target.fd)


def _records(directory: Directory, prefix: str) -> Iterator[str]:
    """Names of which there is a record; what is no file is none."""
    for record in _files(directory):
        if record[0] != "." and (name := unquote(record)).startswith(prefix):
            yield name


def _files(directory: Directory) -> list[str]:
    with contextlib.suppress(FileNotFoundError), directory.scan() as entries:
        return [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
    return []  # the directory was removed
