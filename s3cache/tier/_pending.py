"""Records of what is still to be uploaded: they survive their process and get exactly one heir.

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
import fcntl
import os
import secrets
import threading
import time
from collections.abc import Container, Iterator
from dataclasses import dataclass
from urllib.parse import quote, unquote

from s3cache._forks import call_in_child, close_unshared, open_unshared
from s3cache.errors import ClosedError
from s3cache.store import make_private

__all__ = ["Pending"]

_LOCK = ".lock"
# What a note begins with, and no frame does.
_NOTE = b"s3cache note\n"
_MAX_NOTE_BYTES = 64 << 10
# A new owner locks its directory right after making it; a directory without a lock file is left
# alone for that long.
_GRACE_S = 60.0


@dataclass(frozen=True, slots=True)
class _Owner:
    path: str
    fd: int


class Pending:
    """The records below ``root``.

    Every method may raise ``OSError``, and those that make records ``ClosedError``.

    Args:
        note: kept in each record made here, for whoever uploads the object; a link has none.
    """

    def __init__(self, root: str, note: bytes = b"") -> None:
        self.root = root
        self.note = note
        self._mutex = threading.Lock()
        self._owner: _Owner | None = None
        self._closed = False
        call_in_child(self._forget)

    def add(self, name: str, file: str) -> bool:
        """Record ``name`` as ours to upload, with a link to ``file``; false if it was already."""
        path = os.path.join(self._own().path, _record(name))
        try:
            try:
                if self.note:
                    self._write_note(path)
                    return True
                os.link(file, path)
            except (FileExistsError, FileNotFoundError):
                raise
            except OSError:  # no links on this file system, or too many
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                os.close(os.open(path, flags, 0o600))
        except FileExistsError:
            if self.note_of(name) != self.note:
                # Another one's, adopted: who saves it last says how it is to be uploaded.
                os.unlink(path)
                self.add(name, file)
            return False
        return True

    def _write_note(self, path: str) -> None:
        # Complete or not there, also after a power failure: without it the object would go up in
        # a way that its saver did not want.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        staged = os.path.join(os.path.dirname(path), f".{secrets.token_hex(8)}")
        fd = os.open(staged, flags, 0o600)
        try:
            os.write(fd, _NOTE + self.note)
            os.fsync(fd)
            os.link(staged, path)
        finally:
            os.close(fd)
            os.unlink(staged)

    def note_of(self, name: str) -> bytes | None:
        """The note in our record of ``name``; empty if it has none, ``None`` without a record."""
        owner = self._owner
        if owner is None:
            return None
        try:
            with open(os.path.join(owner.path, _record(name)), "rb") as file:
                if file.read(len(_NOTE)) != _NOTE:  # a link to the object
                    return b""
                return file.read(_MAX_NOTE_BYTES)
        except FileNotFoundError:
            return None

    def remove(self, name: str) -> None:
        """Forget our record of ``name``, if there is one."""
        owner = self._owner
        if owner is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(owner.path, _record(name)))

    def mine(self, prefix: str) -> list[str]:
        """Names starting with ``prefix`` that this process is to upload."""
        owner = self._owner
        return [] if owner is None else list(_records(owner.path, prefix))

    def everybodys(self) -> set[str]:
        """Names that any process, living or dead, has recorded."""
        return {name for path in self._owners() for name in _records(path, "")}

    def adopt(self, prefix: str, limit: int | None = None, but: Container[str] = ()) -> list[str]:
        """Take over the records of dead owners; returns the names that became ours.

        Any number of processes may try at once: each record goes to exactly one of them.

        Args:
            limit: so many at most.
            but: names to leave alone.
        """
        adopted: list[str] = []
        for path in self._owners():
            own = self._owner
            if own is not None and path == own.path:
                continue
            fd = _try_lock(path)
            if fd is None:
                continue
            try:
                for name in _records(path, prefix):
                    if name in but:
                        continue
                    if limit is not None and len(adopted) >= limit:
                        return adopted
                    os.replace(
                        os.path.join(path, _record(name)),
                        os.path.join(self._own().path, _record(name)),
                    )
                    adopted.append(name)
                _remove_if_empty(path)
            except FileNotFoundError:  # the directory was removed under us
                continue
            except OSError:
                if not adopted:
                    raise
                break  # whoever asked must hear of what became ours
            finally:
                close_unshared(fd)
        return adopted

    def give_back(self, name: str) -> None:
        """Move our record of ``name``, if there is one, to where another process adopts it."""
        owner = self._owner
        while owner is not None:
            # As of an owner that is gone: whoever looks may take the lock. One who does before the
            # record is there removes the directory.
            path = os.path.join(self.root, secrets.token_hex(8))
            make_private(path)
            with contextlib.suppress(FileNotFoundError):
                os.close(os.open(os.path.join(path, _LOCK), os.O_CREAT | os.O_CLOEXEC, 0o600))
            fd = _try_lock(path)
            if fd is None:
                continue
            try:
                with contextlib.suppress(FileNotFoundError):  # the record is not there
                    os.replace(
                        os.path.join(owner.path, _record(name)), os.path.join(path, _record(name))
                    )
                _remove_if_empty(path)
            finally:
                close_unshared(fd)
            return

    def release(self) -> None:
        """Let the records go: another process may adopt what is left of them."""
        with self._mutex:
            owner, self._owner = self._owner, None
        if owner is not None:
            _remove_if_empty(owner.path)
            close_unshared(owner.fd)

    def close(self) -> None:
        """Let the records go for good: an adoption that is under way takes nothing any more."""
        with self._mutex:
            self._closed = True
        self.release()

    def _own(self) -> _Owner:
        with self._mutex:
            if self._closed:
                raise ClosedError("the local tier was closed")
            while self._owner is None:
                path = os.path.join(self.root, secrets.token_hex(8))
                make_private(self.root)
                make_private(path)
                with contextlib.suppress(FileNotFoundError):
                    os.close(os.open(os.path.join(path, _LOCK), os.O_CREAT | os.O_CLOEXEC, 0o600))
                # An adopter may have taken the lock first and removed the directory: then again.
                fd = _try_lock(path)
                if fd is not None:
                    self._owner = _Owner(path, fd)
            return self._owner

    def _owners(self) -> Iterator[str]:
        with contextlib.suppress(FileNotFoundError), os.scandir(self.root) as found:
            for entry in found:
                yield entry.path

    def _forget(self) -> None:
        # The lock and the records stay the parent's.
        self._mutex = threading.Lock()
        self._owner = None


def _record(name: str) -> str:
    record = quote(name, safe="")
    return "%2E" + record[1:] if record[:1] == "." else record


def _records(path: str, prefix: str) -> Iterator[str]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for record in os.listdir(path):
            if record[0] != "." and (name := unquote(record)).startswith(prefix):
                yield name


def _remove_if_empty(path: str) -> None:
    """Remove an owner's directory, its lock held, unless there are records in it."""
    with contextlib.suppress(OSError):  # NFS keeps the name of an open file: a later adopter can
        present = os.listdir(path)
        if _LOCK in present and all(name[0] == "." for name in present):  # and no half note
            for name in present:
                os.unlink(os.path.join(path, name))
            os.rmdir(path)


def _try_lock(path: str) -> int | None:
    """Lock the owner's directory, or ``None``: the owner lives, or it is gone or not ready."""
    lock = os.path.join(path, _LOCK)
    try:
        fd = open_unshared(lock, os.O_RDWR)
    except NotADirectoryError:  # somebody's file, not an owner's directory
        return None
    except FileNotFoundError:
        with contextlib.suppress(OSError):
            if time.time() - os.stat(path).st_mtime > _GRACE_S:
                os.rmdir(path)
        return None
    locked = False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        locked = os.path.samestat(os.stat(lock), os.fstat(fd))
    except (BlockingIOError, FileNotFoundError):
        pass
    finally:
        if not locked:
            close_unshared(fd)
    return fd if locked else None
