"""Objects as files below one private directory.

Layout, every name below ``root``::

    objects/<segment>+/.../<segment>    one file an object; "/" in a key makes a directory
    staging/<random>                    being written; renamed into objects/ when complete

A segment keeps ``a-z 0-9 _ . = -`` and percent-encodes every other byte of its UTF-8, capitals
too: two keys stay two files where the file system folds case. A directory's name ends in ``+``, so
a key may be a prefix of another. A segment longer than a file name may be is cut into pieces: each
but the last is a directory that ends in ``~``, each but the first begins with ``~``. No name begins
with a dot: such files are not ours (NFS puts ``.nfs...`` where an open file is deleted).

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
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias, TypeVar
from urllib.parse import quote, unquote

from s3cache.errors import ConfigError, PreconditionError
from s3cache.store._base import (
    MAX_KEY_BYTES,
    Buffer,
    NotAccepted,
    ObjectInfo,
    check_key,
    check_range,
    is_key,
    os_errors,
)
from s3cache.store._directory import Directory, make_parents

__all__ = ["ObjectFiles", "Staged", "mark_used"]

_T = TypeVar("_T")
_Names: TypeAlias = tuple[str, ...]

_OBJECTS: _Names = ("objects",)
_STAGING: _Names = ("staging",)
# Directories near the root stay open: so deep below it, and so many.
_HELD_DEPTH = 4
_MAX_HELD = 16

_PLAIN = re.compile(r"[a-z0-9_=-][a-z0-9_.=-]*")
_MUST_ESCAPE = re.compile(r"[^a-z0-9_.=-]")
PIECE_BYTES = 200  # file names may have 255 bytes; the rest is room for the suffix

# A writer locks its staged file right after creating it; the sweep leaves it that long to do so.
_SWEEP_GRACE_S = 60.0


class ObjectFiles:
    """Objects as files. Synchronous; any number of threads and processes may share ``root``.

    What a store on a directory and the disk tier have in common. It bounds and evicts nothing.

    Args:
        root: created with mode 0700 (parents with 0755 at most) unless it exists.

    Raises:
        ConfigError: ``root``, or what belongs in it, is a symbolic link, no directory, another
            user's, or writable by group or others; or anybody may rename what is in a directory
            above it. A user who can write there can run code in every reader.
        StoreError: it cannot be created.
    """

    def __init__(self, root: str | os.PathLike[str], *, create: bool = True) -> None:
        self.root = os.path.abspath(os.fspath(root))
        self.url = f"file://{quote(self.root)}"
        # By their names below the root; the root itself has none.
        self._held: dict[_Names, Directory] = {}
        with os_errors("open", self.url):
            if create:
                self.ensure()
            else:
                self._held[()] = Directory.at(self.root)

    # -- directories

    def ensure(self) -> None:
        """Make the root and what belongs in it, as far as it is missing; check that it is ours."""
        make_parents(self.root)
        for names in (_OBJECTS, _STAGING):
            self._enter(names, make=True)

    def directory(self, name: str = "", *, make: bool = False) -> Directory:
        """Return the root, or a directory in it, to work in by its descriptor.

        Raises:
            FileNotFoundError: it is missing, and ``make`` is not set.
            ConfigError: it is not ours alone.
        """
        self._forget_removed()
        return self._enter((name,) if name else (), make=make)

    def _enter(self, names: _Names, *, make: bool = False) -> Directory:
        if (held := self._held.get(names)) is not None:
            return held
        if names:
            directory = self._enter(names[:-1], make=make).enter(names[-1], make=make)
        else:
            if make:
                make_parents(self.root)
            directory = Directory.at(self.root, make=make)
        # Those that hold objects are many, those above them few.
        if len(names) < _HELD_DEPTH and len(self._held) < _MAX_HELD:
            self._held[names] = directory
        return directory

    def _forget_removed(self) -> bool:
        """Return whether a held directory was removed; the next call looks for it again."""
        removed = [names for names, held in [*self._held.items()] if held.is_removed()]
        for names in removed:
            self._held.pop(names, None)
        if () in removed:
            self._held.clear()
        return bool(removed)

    def _at(self, names: _Names, act: Callable[[Directory, str], _T]) -> _T:
        """Return what ``act`` does with the directory and the name of a file."""
        try:
            return act(self._enter(names[:-1]), names[-1])
        except FileNotFoundError:
            if not self._forget_removed():
                raise
        return act(self._enter(names[:-1]), names[-1])

    # -- reading

    def path(self, key: str) -> str:
        """Return the file that holds (or would hold) ``key``."""
        return os.path.join(self.root, *_names(key))

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes | None:
        """Return the object's bytes, or ``length`` of them from ``start``; None if absent."""
        if length is not None:
            check_range(start, length)
        with self._opened(key) as (fd, size):
            if fd is None:
                return None
            left = max(size - start, 0)
            return _read_exactly(fd, left if length is None else min(length, left), start)

    def read_if(self, key: str, at_most: int) -> bytes | NotAccepted | None:
        """Return the object's bytes if they are no more than ``at_most``; None if absent."""
        with self._opened(key) as (fd, size):
            if fd is None:
                return None
            return NotAccepted(size) if size > at_most else _read_exactly(fd, size, 0)

    def use(self, key: str) -> bytes | None:
        """Return what :meth:`read` does, and mark the object as used just now."""
        with self._opened(key) as (fd, size):
            if fd is None:
                return None
            data = _read_exactly(fd, size, 0)
            # On a disk that became read-only the bytes are good all the same.
            with contextlib.suppress(OSError):
                mark_used(fd)
            return data

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[tuple[int | None, int]]:
        """Give the block a descriptor of the object's file, None if absent, and its size."""
        check_key(key)
        with os_errors("get", self.url, key):
            try:
                fd = self._at(_names(key), _open_to_read)
            except (FileNotFoundError, NotADirectoryError):
                yield None, 0
                return
            try:
                status = os.fstat(fd)
                yield (fd, status.st_size) if _is_object(status) else (None, 0)
            finally:
                os.close(fd)

    def stat(self, key: str) -> ObjectInfo | None:
        """Return the object's size and time of last change, or None if absent."""
        check_key(key)
        with os_errors("head", self.url, key):
            try:
                status = self._at(_names(key), _stat)
            except (FileNotFoundError, NotADirectoryError):
                return None
        return ObjectInfo(key, status.st_size, status.st_mtime) if _is_object(status) else None

    def walk(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield every object with a key below ``prefix``; not all that are deleted meanwhile.

        Costs one directory scan per directory that can hold such keys. Files that are not at the
        place of a key are passed over: they could be neither read nor deleted.
        """
        if len(prefix) > MAX_KEY_BYTES:
            return
        *parents, last = map(_escape, prefix.split("/"))
        names = (*_OBJECTS, *(piece for segment in parents for piece in _pieces(segment, "+")))
        done = "".join(f"{segment}/" for segment in parents)
        with os_errors("list", self.url, prefix), _absent_is_fine():
            self._forget_removed()
            yield from _walk(self._enter(names), names, done, done + last)

    # -- writing

    def write(self, key: str, data: Buffer) -> None:
        """Write or replace the object, atomically; bytes and name have reached the disk then."""
        with self.staged(key, data, durable=True) as staged:
            self._flush_name(key, made=self._into_place(staged.replace, key))

    def create(self, key: str, data: Buffer) -> None:
        """Write the object durably unless it exists; exactly one of several creators wins.

        Raises:
            PreconditionError: the object exists; it was left alone.
        """
        with self.staged(key, data, durable=True) as staged:
            try:
                # Unlike rename, link refuses an existing name, on NFS too.
                made = self._into_place(staged.link, key)
            except FileExistsError:
                raise PreconditionError(
                    "already exists", op="put", store=self.url, key=key
                ) from None
            staged.remove()
            self._flush_name(key, made=made)

    def delete(self, key: str) -> None:
        """Remove the object, if there is one."""
        check_key(key)
        with os_errors("delete", self.url, key), _absent_is_fine():
            self._at(_names(key), lambda directory, name: os.unlink(name, dir_fd=directory.fd))

    def move(self, key: str, target: Directory, name: str) -> None:
        """Move the object to another directory, in which it is called ``name``."""
        self._at(
            _names(key),
            lambda directory, file: os.replace(
                file, name, src_dir_fd=directory.fd, dst_dir_fd=target.fd
            ),
        )

    @contextlib.contextmanager
    def staged(self, key: str, data: Buffer, *, durable: bool) -> Iterator[Staged]:
        """Write ``data`` to a staged file, for the block to move or remove.

        With ``durable`` the bytes have reached the disk. If the block fails nothing is left.
        """
        check_key(key)
        with os_errors("put", self.url, key):
            try:
                staged = self._open_staged()
            except FileNotFoundError:  # the root was removed: make it again
                self._forget_removed()
                self.ensure()
                staged = self._open_staged()
            try:
                view = memoryview(data).cast("B")
                while view:
                    view = view[os.write(staged.fd, view) :]
                if durable:
                    # macOS has no fdatasync
                    (os.fdatasync if hasattr(os, "fdatasync") else os.fsync)(staged.fd)
                yield staged
            except BaseException:
                with contextlib.suppress(OSError):  # moved, or left to the sweep
                    staged.remove()
                raise
            finally:
                os.close(staged.fd)

    def _open_staged(self) -> Staged:
        """Make a file in staging, locked so that no sweep takes it as long as we live."""
        directory = self._enter(_STAGING)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        while True:
            name = secrets.token_hex(8)
            fd = os.open(name, flags, 0o600, dir_fd=directory.fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(fd).st_nlink:
                    return Staged(directory, name, fd)
            except BlockingIOError:
                pass
            except OSError:  # some network mounts have no locks, and no sweep either
                return Staged(directory, name, fd)
            # Stopped between the two calls for so long that a sweep took the file: another one.
            os.close(fd)

    def rename(self, staged: Staged, key: str) -> None:
        """Move a staged file to its place, making directories as needed."""
        self._into_place(staged.replace, key)

    def _into_place(self, move: Callable[[Directory, str], None], key: str) -> bool:
        """Move a file to the object's place; return whether directories had to be made for it."""
        names = _names(key)
        try:
            move(self._enter(names[:-1]), names[-1])
        except FileNotFoundError:
            self._forget_removed()
            move(self._enter(names[:-1], make=True), names[-1])
            return True
        return False

    def _flush_name(self, key: str, *, made: bool) -> None:
        """Flush the directory of the object, and those above it if they are new."""
        names = _names(key)[:-1]
        self._enter(names).flush()
        while made and names:
            names = names[:-1]
            self._enter(names).flush()

    def sweep(self) -> int:
        """Remove what killed writers left in staging; return how many files."""
        removed = 0
        with os_errors("sweep", self.url), _absent_is_fine():
            self._forget_removed()
            directory = self._enter(_STAGING)
            with directory.scan() as entries:
                for entry in entries:
                    with _absent_is_fine():
                        age_s = time.time() - entry.stat(follow_symlinks=False).st_mtime
                        if age_s > _SWEEP_GRACE_S:
                            removed += _remove_unlocked(entry.name, directory)
        return removed


class Staged:
    """A file that is being written, to be moved to its place."""

    __slots__ = ("directory", "fd", "name")

    def __init__(self, directory: Directory, name: str, fd: int) -> None:
        self.directory = directory
        self.name = name
        self.fd = fd

    @property
    def path(self) -> str:
        return f"{self.directory.path}/{self.name}"

    def replace(self, directory: Directory, name: str) -> None:
        """Move it."""
        os.replace(self.name, name, src_dir_fd=self.directory.fd, dst_dir_fd=directory.fd)

    def link(self, directory: Directory, name: str) -> None:
        """Give it another name, unless there is something of that name."""
        os.link(self.name, name, src_dir_fd=self.directory.fd, dst_dir_fd=directory.fd)

    def remove(self) -> None:
        os.unlink(self.name, dir_fd=self.directory.fd)


def mark_used(fd: int) -> None:
    """Set the file's time of last change to now."""
    # The kernel's own clock for files ticks only every few milliseconds.
    now = time.time_ns()
    os.utime(fd, ns=(now, now))


# -- names


def _names(key: str) -> _Names:
    """Return the names of the directories that hold the object below the root, and of its file."""
    *parents, last = map(_escape, key.split("/"))
    pieces = (piece for segment in parents for piece in _pieces(segment, "+"))
    return (*_OBJECTS, *pieces, *_pieces(last, ""))


def _escape(segment: str) -> str:
    if _PLAIN.fullmatch(segment):
        return segment
    text = _MUST_ESCAPE.sub(lambda found: _percent(found[0]), segment)
    return "%2e" + text[1:] if text[:1] == "." else text


def _percent(character: str) -> str:
    # A prefix to list may hold a lone surrogate, which no key does.
    return "".join(f"%{byte:02x}" for byte in character.encode(errors="surrogatepass"))


def _pieces(escaped: str, suffix: str) -> list[str]:
    """Return file names for one escaped segment: one, unless it is too long for a file name."""
    if len(escaped) <= PIECE_BYTES:
        return [escaped + suffix]
    pieces = [escaped[i : i + PIECE_BYTES] for i in range(0, len(escaped), PIECE_BYTES)]
    *parents, last = pieces[:1] + ["~" + piece for piece in pieces[1:]]
    return [*(parent + "~" for parent in parents), last + suffix]


def _deeper(done: str, name: str) -> str:
    """Return the escaped key so far, in the directory called ``name``."""
    return done + name.removeprefix("~")[:-1] + ("/" if name[-1] == "+" else "")


# -- directories of objects


def _walk(directory: Directory, names: _Names, done: str, prefix: str) -> Iterator[ObjectInfo]:
    """Yield the objects below the directory.

    ``done`` is the escaped key so far, ``prefix`` is escaped too.
    """
    with _absent_is_fine(), directory.scan() as entries:
        for entry in entries:
            if entry.name[-1] in "+~":
                deeper = _deeper(done, entry.name)
                if deeper.startswith(prefix) or prefix.startswith(deeper):
                    with _absent_is_fine(), contextlib.suppress(ConfigError):  # gone, or not ours
                        below = directory.enter(entry.name)
                        yield from _walk(below, (*names, entry.name), deeper, prefix)
            elif (done + entry.name.removeprefix("~")).startswith(prefix):
                yield from _objects(directory, [entry.name], names, done)


def _objects(
    directory: Directory, files: Iterable[str], names: _Names, done: str
) -> Iterator[ObjectInfo]:
    for name in files:
        with _absent_is_fine():
            status = _stat(directory, name)
            key = unquote(done + name.removeprefix("~"))
            if _is_object(status) and is_key(key) and _names(key) == (*names, name):
                yield ObjectInfo(key, status.st_size, status.st_mtime)


# -- files


def _open_to_read(directory: Directory, name: str) -> int:
    try:
        # Do not wait for the other end of a pipe that was put there.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        return os.open(name, flags, dir_fd=directory.fd)
    except OSError as exc:
        if exc.errno == errno.ELOOP:  # a symbolic link is no object
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name) from exc
        raise


def _stat(directory: Directory, name: str) -> os.stat_result:
    return os.stat(name, dir_fd=directory.fd, follow_symlinks=False)


def _is_object(status: os.stat_result) -> bool:
    """Return whether it is a file of ours: one that another user planted is no object."""
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def _absent_is_fine() -> contextlib.suppress:
    return contextlib.suppress(FileNotFoundError, NotADirectoryError)


def _read_exactly(fd: int, size: int, start: int) -> bytes:
    if not size:
        return b""
    data = os.pread(fd, size, start)
    while len(data) < size:  # one read gives at most 2 GiB
        more = os.pread(fd, size - len(data), start + len(data))
        if not more:
            break
        data += more
    return data


def _remove_unlocked(name: str, directory: Directory) -> int:
    # NFS locks exclusively only what is open for writing: flock(2)
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(name, flags, dir_fd=directory.fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # its writer lives, or that cannot be found out
        return 0
    else:
        os.unlink(name, dir_fd=directory.fd)
        return 1
    finally:
        os.close(fd)
