"""Pending uploads: they survive their process, and exactly one other process takes them over.

A pending upload is an empty file ``<name>@<owner>``, with the object's name percent-encoded. An
owner is a process; it holds a lock on the file ``<owner>.lock`` while it lives. A process that gets
this lock knows that the owner is dead, and renames its files.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import stat
from collections.abc import Callable, Container
from urllib.parse import quote, unquote

from s3cache.errors import ClosedError
from s3cache.store import Directory
from s3cache.util.threads import call_in_child, close_unshared

_LOCK = ".lock"
_name_of = functools.lru_cache(4096)(unquote)  # most names are read again and again


class Pending:
    """The pending uploads in the directory that ``open_root`` returns, or creates if given True.

    Callers of methods that make changes hold the lock on the tier's objects: no two processes
    create, move or remove files here at once. Every method may raise ``OSError``.
    """

    def __init__(self, open_root: Callable[[bool], Directory]) -> None:
        self._open_root = open_root
        self._is_closed = False
        self._forget()
        call_in_child(self._forget)  # the parent keeps lock and uploads

    def _forget(self) -> None:
        self._owner, self._lock_fd = "", -1
        #: Names of our uploads that another process saved.
        self.adopted: set[str] = set()
        #: Names that this process added and has not removed, even if their files are gone.
        self.promised: set[str] = set()

    def add(self, name: str) -> bool:
        """Add ``name`` to the uploads of this process; return False if it was there."""
        root = self._own()
        is_new = not self.holds(name)
        if is_new:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            os.close(os.open(_file_of(name, self._owner), flags, 0o600, dir_fd=root.fd))
        self.promised.add(name)
        self.adopted.discard(name)
        return is_new

    def _own(self) -> Directory:
        """Return the directory, and make this process an owner in it."""
        root = self._open_root(True)
        if self._lock_fd < 0 or not os.fstat(self._lock_fd).st_nlink:  # it was removed by hand
            self._release()
            if not self._is_closed:
                owner = secrets.token_hex(8)
                lock_fd = root.try_lock(f"{owner}{_LOCK}")
                assert lock_fd is not None, "another process has the lock on the tier's objects"
                self._owner, self._lock_fd = owner, lock_fd
        if self._is_closed:  # perhaps meanwhile: the lock would never be released
            self._release()
            raise ClosedError("the local tier was closed")
        return root

    def holds(self, name: str) -> bool:
        try:
            root = self._open_root(False)
            status = os.stat(_file_of(name, self._owner), dir_fd=root.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return stat.S_ISREG(status.st_mode)

    def remove(self, name: str) -> None:
        self._unlink(_file_of(name, self._owner))
        self.adopted.discard(name)
        self.promised.discard(name)

    def _unlink(self, file: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            root = self._open_root(False)  # keep it: its descriptor is closed with it
            os.unlink(file, dir_fd=root.fd)

    def mine(self) -> list[str]:
        """List the names that this process will upload; takes no lock."""
        return self._by_owner().get(self._owner, [])

    def all_pending(self) -> set[str]:
        """Return the pending names of all processes, living or dead."""
        return {name for names in self._by_owner().values() for name in names}

    def _by_owner(self) -> dict[str, list[str]]:
        pending: dict[str, list[str]] = {}
        with contextlib.suppress(FileNotFoundError), self._open_root(False).scan() as entries:
            for entry in entries:
                if entry.name.endswith(_LOCK):
                    pending.setdefault(entry.name[: -len(_LOCK)], [])
                elif "@" in entry.name and entry.is_file(follow_symlinks=False):
                    file, _, owner = entry.name.rpartition("@")
                    pending.setdefault(owner, []).append(_name_of(file))
        return pending

    def abandoned(self) -> list[str]:
        """List the names that dead processes have left."""
        left = self._by_owner().items()
        return [name for owner, names in left if names and self._is_dead(owner) for name in names]

    def _is_dead(self, owner: str) -> bool:
        """Return whether a process can be replaced: it is not this one, and holds no lock."""
        lock_fd = None
        if owner != self._owner:
            with contextlib.suppress(OSError):  # another file was planted in its place
                lock_fd = self._open_root(False).try_lock(f"{owner}{_LOCK}")
        if lock_fd is not None:
            close_unshared(lock_fd)
        return lock_fd is not None

    def adopt(
        self, prefix: str = "", limit: int | None = None, but: Container[str] = ()
    ) -> list[str]:
        """Take over up to ``limit`` uploads of dead owners; return their names."""
        taken: list[str] = []
        for owner, names in self._by_owner().items():
            if not self._is_dead(owner):
                continue
            for name in names:
                if not name.startswith(prefix) or name in but:
                    continue
                if len(taken) == limit:
                    return taken
                root, file = self._own(), _file_of(name, owner)
                if self.holds(name) and name not in self.adopted:
                    self._unlink(file)  # our own save takes precedence
                else:
                    _move(root, file, _file_of(name, self._owner))
                    self.adopted.add(name)
                taken.append(name)
            if {*names} <= {*taken}:
                self._unlink(f"{owner}{_LOCK}")
        return taken

    def give_back(self, name: str) -> bool:
        """Return an adopted upload, so that others can adopt it; return False if it is our own."""
        if name not in self.adopted:
            return False
        self.adopted.discard(name)
        no_owner = secrets.token_hex(8)
        _move(self._open_root(True), _file_of(name, self._owner), _file_of(name, no_owner))
        return True

    def close(self) -> None:
        """Refuse new uploads, and leave pending ones to other processes."""
        self._is_closed = True
        self._release()

    def _release(self) -> None:
        lock_fd = self._lock_fd
        try:
            if lock_fd >= 0 and not self.mine():
                self._unlink(f"{self._owner}{_LOCK}")
        finally:
            self._forget()
            if lock_fd >= 0:
                close_unshared(lock_fd)


def _file_of(name: str, owner: str) -> str:
    return f"{quote(name, safe='')}@{owner}"


def _move(root: Directory, source: str, target: str) -> None:
    os.replace(source, target, src_dir_fd=root.fd, dst_dir_fd=root.fd)
