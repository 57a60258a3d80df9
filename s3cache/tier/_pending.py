"""Records of what is still to be uploaded: they survive their process and get exactly one heir.

Each process has a directory ``pending/<owner>/`` and holds a lock on the file ``lock`` in it for
as long as it lives. One empty file beside the lock is one record; its name is the object's,
percent-encoded. Whoever can take the lock of another's directory knows that its owner is gone, and
while holding it moves the records to its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import quote, unquote

from s3cache.tier._forked import close_in_children, closed

__all__ = ["Pending"]

_LOCK = "lock"
# A new owner locks its directory right after making it; a directory without a lock file is left
# alone for that long.
_GRACE_S = 60.0


@dataclass(frozen=True, slots=True)
class _Owner:
    pid: int
    path: str
    fd: int


class Pending:
    """The records below ``root``. Every method may raise ``OSError``."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._mutex = threading.Lock()
        self._owner: _Owner | None = None
        _instances.add(self)

    def add(self, name: str) -> bool:
        """Record ``name`` as ours to upload; false if it was already."""
        path = os.path.join(self._own().path, quote(name, safe=""))
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            return False
        return True

    def remove(self, name: str) -> None:
        """Forget our record of ``name``, if there is one."""
        if self._owner is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self._owner.path, quote(name, safe="")))

    def mine(self, prefix: str) -> list[str]:
        """Names starting with ``prefix`` that this process is to upload."""
        return [] if self._owner is None else list(_records(self._owner.path, prefix))

    def everybodys(self) -> set[str]:
        """Names that any process, living or dead, has recorded."""
        return {name for path in self._owners() for name in _records(path, "")}

    def adopt(self, prefix: str) -> list[str]:
        """Take over the records of dead owners; returns the names that became ours.

        Any number of processes may try at once: each record goes to exactly one of them.
        """
        adopted: list[str] = []
        for path in self._owners():
            if self._owner is not None and path == self._owner.path:
                continue
            fd = _try_lock(path)
            if fd is None:
                continue
            try:
                for name in _records(path, prefix):
                    record = quote(name, safe="")
                    os.replace(os.path.join(path, record), os.path.join(self._own().path, record))
                    adopted.append(name)
                if os.listdir(path) == [_LOCK]:
                    os.unlink(os.path.join(path, _LOCK))
                    os.rmdir(path)
            except FileNotFoundError:  # the directory was removed under us
                continue
            finally:
                closed(fd)
        return adopted

    def release(self) -> None:
        """Let the records go: another process may adopt what is left of them."""
        with self._mutex:
            owner, self._owner = self._owner, None
        if owner is not None:
            with contextlib.suppress(OSError):  # nothing recorded: leave nothing behind
                if os.listdir(owner.path) == [_LOCK]:
                    os.unlink(os.path.join(owner.path, _LOCK))
                    os.rmdir(owner.path)
            closed(owner.fd)

    def _own(self) -> _Owner:
        with self._mutex:
            while self._owner is None:
                path = os.path.join(self._root, secrets.token_hex(8))
                os.makedirs(path, mode=0o700)
                with contextlib.suppress(FileNotFoundError):
                    os.close(os.open(os.path.join(path, _LOCK), os.O_CREAT | os.O_CLOEXEC, 0o600))
                # An adopter may have taken the lock first and removed the directory: then again.
                fd = _try_lock(path)
                if fd is not None:
                    self._owner = _Owner(os.getpid(), path, fd)
            return self._owner

    def _owners(self) -> Iterator[str]:
        with contextlib.suppress(FileNotFoundError), os.scandir(self._root) as found:
            for entry in found:
                yield entry.path

    def forget(self) -> None:
        """In a forked child: the lock and the records stay the parent's."""
        self._mutex = threading.Lock()
        self._owner = None


_instances: weakref.WeakSet[Pending] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for pending in _instances:
        pending.forget()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _records(path: str, prefix: str) -> Iterator[str]:
    with contextlib.suppress(FileNotFoundError):
        for record in os.listdir(path):
            if record != _LOCK and (name := unquote(record)).startswith(prefix):
                yield name


def _try_lock(path: str) -> int | None:
    """Lock the owner's directory, or ``None``: the owner lives, or it is gone or not ready."""
    lock = os.path.join(path, _LOCK)
    try:
        fd = close_in_children(os.open(lock, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        with contextlib.suppress(OSError):
            if time.time() - os.stat(path).st_mtime > _GRACE_S:
                os.rmdir(path)
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.stat(lock), os.fstat(fd)):
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    closed(fd)
    return None
