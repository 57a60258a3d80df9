"""Objects as files below one private directory: the synchronous core of the local store and tier.

Layout, every name below ``root``::

    objects/<segment>+/.../<segment>    one file an object; "/" in a key makes a directory
    staging/<random>                    being written; renamed into objects/ when complete

A segment keeps ``a-z 0-9 _ . = -`` and percent-encodes every other byte of its UTF-8, capitals
too: two keys stay two files where the file system folds case. A directory's name ends in ``+``, so
a key may be a prefix of another. A segment longer than a file name may be is cut into pieces: each
but the last is a directory that ends in ``~``, each but the first begins with ``~``. No name begins
with a dot: what does is not ours (NFS puts ``.nfs...`` where an open file is deleted).

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
from s3cache.store._base import MAX_KEY_BYTES, Buffer, ObjectInfo, check_key, check_range

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
            else:
                check_private(self.root)

    def ensure(self) -> None:
        """Make the root and what belongs in it, as far as it is missing; check that it is ours."""
        os.makedirs(os.path.dirname(self.root), exist_ok=True)
        make_private(self.root)
        check_private(self.root)
        make_private(self._objects)
        make_private(self._staging)

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
                return _read_exactly(fd, wanted, start) if wanted else b""
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
        if len(prefix) > MAX_KEY_BYTES:
            return
        *parents, last = map(_escape, prefix.split("/"))
        parts = [part for segment in parents for part in _parts(segment, "+")]
        done = "".join(f"{segment}/" for segment in parents)
        with os_errors("list", self.url, prefix):
            yield from _walk(os.path.join(self._objects, *parts), done, done + last)

    # -- writing

    def write(self, key: str, data: Buffer) -> None:
        """Write or replace the object, atomically; bytes and name have reached the disk then."""
        with self.staged(key, data, durable=True) as staged:
            target = self.path(key)
            made = self._into_place(os.replace, staged, target)
            self._flush_name(target, made)

    def create(self, key: str, data: Buffer) -> None:
        """Write the object durably unless it exists; exactly one of several creators wins.

        Raises:
            PreconditionError: the object exists; it was left alone.
        """
        with self.staged(key, data, durable=True) as staged:
            target = self.path(key)
            try:
                # Unlike rename, link refuses an existing name, on NFS too.
                made = self._into_place(os.link, staged, target)
            except FileExistsError:
                raise PreconditionError(
                    "already exists", op="put", store=self.url, key=key
                ) from None
            os.unlink(staged)
            self._flush_name(target, made)

    def delete(self, key: str) -> None:
        """Remove the object, if there is one."""
        check_key(key)
        with os_errors("delete", self.url, key), _absent_is_fine():
            os.unlink(self.path(key))

    @contextlib.contextmanager
    def staged(self, key: str, data: Buffer, *, durable: bool) -> Iterator[str]:
        """Write ``data`` to a staged file and give its path, for the block to move or remove.

        With ``durable`` the bytes have reached the disk. If the block fails nothing is left.
        """
        check_key(key)
        with os_errors("put", self.url, key):
            try:
                path, fd = self._open_staged()
            except FileNotFoundError:  # the root was removed under us: begin anew
                self.ensure()
                path, fd = self._open_staged()
            try:
                _write_all(fd, data)
                if durable:
                    _flush_data(fd)
                yield path
            except BaseException:
                with contextlib.suppress(OSError):  # moved, or left to the sweep
                    os.unlink(path)
                raise
            finally:
                os.close(fd)

    def _open_staged(self) -> tuple[str, int]:
        """A new file in staging, locked so that no sweep takes it as long as we live."""
        while True:
            path = os.path.join(self._staging, secrets.token_hex(8))
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(fd).st_nlink:
                    return path, fd
            except BlockingIOError:
                pass
            except OSError:  # some network mounts have no locks, and no sweep either
                return path, fd
            # Stopped between the two calls for so long that a sweep took the file: another one.
            os.close(fd)

    def rename(self, staged: str, key: str) -> None:
        """Move a staged file to its place, making directories as needed."""
        self._into_place(os.replace, staged, self.path(key))

    def _into_place(self, move: Callable[[str, str], None], staged: str, target: str) -> bool:
        """Whether directories had to be made for it."""
        try:
            move(staged, target)
        except FileNotFoundError:
            self._make_parents(target)
            move(staged, target)
            return True
        return False

    def _make_parents(self, path: str) -> None:
        """The directories that ``path`` is in: seldom more than the last is missing."""
        parent = os.path.dirname(path)
        try:
            make_private(parent)
        except FileNotFoundError:
            if parent == self._objects:
                self.ensure()
            else:
                self._make_parents(parent)
                make_private(parent)

    def _flush_name(self, target: str, made: bool) -> None:
        """Flush the directory ``target`` is in, and those it is in if they are new."""
        path = os.path.dirname(target)
        _flush_directory(path)
        while made and path != self.root:
            path = os.path.dirname(path)
            _flush_directory(path)

    def sweep(self) -> int:
        """Remove what killed writers left in staging; returns how many files."""
        removed = 0
        with os_errors("sweep", self.url), _absent_is_fine(), os.scandir(self._staging) as found:
            for entry in found:
                with _absent_is_fine():
                    if time.time() - entry.stat().st_mtime > _SWEEP_GRACE_S:
                        removed += _remove_unlocked(entry.path)
        return removed


def make_private(path: str) -> None:
    """Make a directory that only we can enter, unless there is something of that name."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)


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
    # A prefix to list may hold a lone surrogate, which no key does.
    return "".join(f"%{byte:02x}" for byte in character.encode(errors="surrogatepass"))


def _parts(escaped: str, suffix: str) -> list[str]:
    """Path parts for one escaped segment: one, unless it is too long for a file name."""
    if len(escaped) <= _PIECE:
        return [escaped + suffix]
    pieces = [escaped[i : i + _PIECE] for i in range(0, len(escaped), _PIECE)]
    *parents, last = pieces[:1] + ["~" + piece for piece in pieces[1:]]
    return [*(parent + "~" for parent in parents), last + suffix]


def _walk(path: str, done: str, prefix: str) -> Iterator[ObjectInfo]:
    """Objects below ``path``; ``done`` is the escaped key so far, ``prefix`` is escaped too."""
    with _absent_is_fine(), os.scandir(path) as found:
        for entry in found:
            last = entry.name[-1]
            name = done + entry.name.removeprefix("~")
            if last in "+~":
                deeper = name[:-1] + ("/" if last == "+" else "")
                if deeper.startswith(prefix) or prefix.startswith(deeper):
                    yield from _walk(entry.path, deeper, prefix)
            elif name.startswith(prefix) and entry.name[0] != ".":
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


def _flush_data(fd: int) -> None:
    # macOS has no fdatasync
    (os.fdatasync if hasattr(os, "fdatasync") else os.fsync)(fd)


def _flush_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)  # fdatasync need not write names: they are not what a directory's size counts
    finally:
        os.close(fd)


def _remove_unlocked(path: str) -> int:
    # NFS locks exclusively only what is open for writing: flock(2)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # its writer lives, or nobody can tell
        return 0
    else:
        os.unlink(path)
        return 1
    finally:
        os.close(fd)
