"""Objects as files below one private directory: the synchronous core of the local store and tier.

Layout, every name below ``root``::

    objects/<segment>+/.../<segment>    one file an object; "/" in a key makes a directory
    staging/<random>                    being written; renamed into objects/ when complete

A segment keeps ``a-z 0-9 _ . = -`` and percent-encodes every other byte of its UTF-8, capitals
too: two keys stay two files where the file system folds case. A directory's name ends in ``+``, so
a key may be a prefix of another. A segment longer than a file name may be is cut into pieces whose
directories end in ``~``.

Writers never touch a visible file: they stage, flush and rename, so a reader in any process sees
whole objects only. A staged file is locked (``flock``) while its writer lives; one that is neither
locked nor young was left by a killed writer and is swept.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from urllib.parse import quote, unquote

from s3cache.errors import (
    AccessDeniedError,
    ConfigError,
    MissingContainerError,
    NoSpaceError,
    PermanentError,
    PreconditionError,
    ReadOnlyError,
    StoreError,
    TransientError,
)
from s3cache.store._base import Buffer, ObjectInfo, check_key, check_range

__all__ = ["Directory", "os_errors"]

_PLAIN = re.compile(r"[a-z0-9_=-][a-z0-9_.=-]*")
_MUST_ESCAPE = re.compile(r"[^a-z0-9_.=-]")
_PIECE = 200  # file names may have 255 bytes; the rest is room for the suffix

# A writer locks its staged file right after creating it; the sweep leaves it that long to do so.
_SWEEP_GRACE_S = 60.0

_ERRORS: dict[int, type[StoreError]] = {
    errno.ENOSPC: NoSpaceError,
    errno.EDQUOT: NoSpaceError,
    errno.EFBIG: NoSpaceError,
    errno.EROFS: ReadOnlyError,
    errno.EACCES: AccessDeniedError,
    errno.EPERM: AccessDeniedError,
    errno.ENOENT: MissingContainerError,
    errno.ENOTDIR: MissingContainerError,
    errno.EIO: TransientError,
    errno.EAGAIN: TransientError,
    errno.EBUSY: TransientError,
    errno.EMFILE: TransientError,
    errno.ENFILE: TransientError,
    errno.ENOLCK: TransientError,
    errno.ESTALE: TransientError,
    errno.ETIMEDOUT: TransientError,
}


@contextlib.contextmanager
def os_errors(op: str, where: str, key: str = "") -> Iterator[None]:
    """Turn any ``OSError`` of the block into the :class:`StoreError` that fits its ``errno``."""
    try:
        yield
    except OSError as exc:
        kind = _ERRORS.get(exc.errno or 0, PermanentError)
        message = exc.strerror or str(exc)
        if exc.filename:
            message += f" ({exc.filename!r})"
        raise kind(message, op=op, store=where, key=key) from exc


class Directory:
    """Objects as files. Synchronous; any number of threads and processes may share ``root``.

    Args:
        root: created with mode 0700 (parents as the umask has it) unless it exists.

    Raises:
        ConfigError: ``root`` is a symbolic link, no directory, another user's, or writable by
            group or others: whoever can write there can run code in every reader.
        StoreError: it cannot be created.
    """

    def __init__(self, root: str | os.PathLike[str], *, create: bool = True) -> None:
        self.root = os.path.abspath(os.fspath(root))
        self.url = f"file://{quote(self.root)}"
        self._objects = os.path.join(self.root, "objects")
        self._staging = os.path.join(self.root, "staging")
        with os_errors("open", self.url):
            if create:
                self.ensure()
            check_private(self.root)

    def ensure(self) -> None:
        """Make the root and what belongs in it, as far as it is missing."""
        os.makedirs(os.path.dirname(self.root), exist_ok=True)
        for path in (self.root, self._objects, self._staging):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)

    # -- reading

    def path(self, key: str) -> str:
        """The file that holds (or would hold) ``key``."""
        *parents, last = map(_escape, key.split("/"))
        parts = [part for segment in parents for part in _parts(segment, "+")]
        return os.path.join(self._objects, *parts, *_parts(last, ""))

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes | None:
        """The object's bytes, or ``length`` of them from ``start``; ``None`` where absent."""
        check_key(key)
        if length is not None:
            check_range(start, length)
        with os_errors("get", self.url, key):
            try:
                fd = os.open(self.path(key), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except (FileNotFoundError, NotADirectoryError):
                return None
            try:
                size = max(os.fstat(fd).st_size - start, 0)
                wanted = size if length is None else min(length, size)
                return _read_exactly(fd, wanted, start)
            finally:
                os.close(fd)

    def stat(self, key: str) -> ObjectInfo | None:
        """The object's size and time of last change, or ``None`` where absent."""
        check_key(key)
        with os_errors("head", self.url, key):
            try:
                status = os.stat(self.path(key), follow_symlinks=False)
            except (FileNotFoundError, NotADirectoryError):
                return None
        return ObjectInfo(key, status.st_size, status.st_mtime)

    def walk(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object whose key starts with ``prefix``; those deleted meanwhile may be missing.

        Costs one directory scan per directory that can hold such keys.
        """
        *parents, last = map(_escape, prefix.split("/"))
        parts = [part for segment in parents for part in _parts(segment, "+")]
        done = "".join(f"{segment}/" for segment in parents)
        with os_errors("list", self.url, prefix):
            yield from _walk(os.path.join(self._objects, *parts), done, done + last)

    # -- writing

    def write(self, key: str, data: Buffer, *, durable: bool = True) -> None:
        """Write or replace the object, atomically.

        With ``durable`` the bytes and the name have reached the disk on return; without, they
        survive the process but perhaps not a power failure.
        """
        with self.staged(key, data, durable=durable) as staged:
            self.rename(staged, key)
            if durable:
                self._flush_parent(key)

    def create(self, key: str, data: Buffer) -> None:
        """Write the object durably unless it exists; exactly one of several creators wins.

        Raises:
            PreconditionError: the object exists; it was left alone.
        """
        with self.staged(key, data, durable=True) as staged:
            target = self.path(key)
            try:
                # Unlike rename, link refuses an existing name, on NFS too.
                self._into_place(os.link, staged, target)
            except FileExistsError:
                raise PreconditionError(
                    "already exists", op="put", store=self.url, key=key
                ) from None
            self._flush_parent(key)

    def delete(self, key: str) -> None:
        """Remove the object, if there is one."""
        check_key(key)
        with os_errors("delete", self.url, key), _absent_is_fine():
            os.unlink(self.path(key))

    @contextlib.contextmanager
    def staged(self, key: str, data: Buffer, *, durable: bool) -> Iterator[str]:
        """Write ``data`` to a staged file and give its path; what is left of it is removed."""
        check_key(key)
        with os_errors("put", self.url, key):
            path = os.path.join(self._staging, secrets.token_hex(8))
            try:
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:  # the root was removed under us: begin anew
                self.ensure()
                check_private(self.root)
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                with contextlib.suppress(OSError):  # some network mounts have no locks
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _write_all(fd, data)
                if durable:
                    _flush(fd)
                yield path
            finally:
                with contextlib.suppress(OSError):
                    # A forked child may hold a copy of the descriptor: unlock, not only close.
                    fcntl.flock(fd, fcntl.LOCK_UN)
                os.close(fd)
                with _absent_is_fine():
                    os.unlink(path)

    def rename(self, staged: str, key: str) -> None:
        """Move a staged file to its place, making directories as needed."""
        self._into_place(os.replace, staged, self.path(key))

    def _into_place(self, move: Callable[[str, str], None], staged: str, target: str) -> None:
        try:
            move(staged, target)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
            move(staged, target)

    def _flush_parent(self, key: str) -> None:
        fd = os.open(os.path.dirname(self.path(key)), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _flush(fd)
        finally:
            os.close(fd)

    def sweep(self) -> int:
        """Remove what killed writers left in staging; returns how many files."""
        removed = 0
        with os_errors("sweep", self.url), _absent_is_fine(), os.scandir(self._staging) as found:
            for entry in found:
                with _absent_is_fine():
                    if time.time() - entry.stat().st_mtime > _SWEEP_GRACE_S:
                        removed += _remove_unlocked(entry.path)
        return removed


def check_private(path: str) -> None:
    """Raises :class:`ConfigError` unless ``path`` is a directory only its owner, us, can write."""
    status = os.lstat(path)
    problem = fix = ""
    if stat.S_ISLNK(status.st_mode):
        problem, fix = "is a symbolic link", "give the directory it points to"
    elif not stat.S_ISDIR(status.st_mode):
        problem, fix = "is no directory", "remove the file or give another path"
    elif status.st_uid != os.geteuid():
        problem = f"belongs to user id {status.st_uid}, not to {os.geteuid()}"
        fix = "give a directory of your own"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem = f"can be written by others (mode {stat.S_IMODE(status.st_mode):04o})"
        fix = f"run: chmod go-w {path}"
    if problem:
        raise ConfigError(f"directory {path}", problem, fix)


def _absent_is_fine() -> contextlib.suppress:
    return contextlib.suppress(FileNotFoundError, NotADirectoryError)


def _escape(segment: str) -> str:
    if _PLAIN.fullmatch(segment):
        return segment
    text = _MUST_ESCAPE.sub(lambda found: _percent(found[0]), segment)
    return "%2e" + text[1:] if text[:1] == "." else text


def _percent(character: str) -> str:
    return "".join(f"%{byte:02x}" for byte in character.encode())


def _parts(escaped: str, suffix: str) -> list[str]:
    """Path parts for one escaped segment: one, unless it is too long for a file name."""
    if len(escaped) <= _PIECE:
        return [escaped + suffix]
    return [escaped[:_PIECE] + "~", *_parts(escaped[_PIECE:], suffix)]


def _walk(path: str, done: str, prefix: str) -> Iterator[ObjectInfo]:
    """Objects below ``path``; ``done`` is the escaped key so far, ``prefix`` is escaped too."""
    with _absent_is_fine(), os.scandir(path) as found:
        for entry in found:
            last = entry.name[-1:]
            if last in "+~":
                deeper = done + entry.name[:-1] + ("/" if last == "+" else "")
                if deeper.startswith(prefix) or prefix.startswith(deeper):
                    yield from _walk(entry.path, deeper, prefix)
            elif (name := done + entry.name).startswith(prefix):
                with _absent_is_fine():
                    status = entry.stat(follow_symlinks=False)
                    yield ObjectInfo(unquote(name), status.st_size, status.st_mtime)


def _read_exactly(fd: int, size: int, start: int) -> bytes:
    data = os.pread(fd, size, start)
    while len(data) < size:  # one read gives at most 2 GiB
        more = os.pread(fd, size - len(data), start + len(data))
        if not more:
            break
        data += more
    return data


def _write_all(fd: int, data: Buffer) -> None:
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(fd, view) :]


def _flush(fd: int) -> None:
    # macOS has no fdatasync
    (os.fdatasync if hasattr(os, "fdatasync") else os.fsync)(fd)


def _remove_unlocked(path: str) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    except BlockingIOError:  # its writer lives
        return 0
    finally:
        os.close(fd)
    return 1
