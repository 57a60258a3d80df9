"""Remember torch's hash of its own source from one process to the next.

torch reads and hashes all its Python files in each process that looks up a key. The result only
changes with the files: here it is kept with a fingerprint of their names, sizes and times, which
takes a fraction of the time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Iterator

from s3cache.errors import ConfigError, StoreError
from s3cache.store import Directory
from s3cache.torch_api import internals
from s3cache.util.deadline import DeadlineExecutor

_FILE = "installation.json"
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# Opening a pipe does not wait for a writer.
_OLD = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_BYTES = 4096  # it has a tenth of that
_SKIPPED = ("__pycache__", "lib", "include", "bin", "share")
_SOURCES = (".py", ".so", ".cpp", ".ld")


def remember_installation(directory: str) -> None:
    """Give torch the hash that an earlier process computed; else compute it, and keep it.

    A file that another user may have written is not read, and the process waits neither for a pipe
    nor for a disk that hangs: then the hash is computed, and not kept.
    """
    fingerprint = fingerprint_of(internals.torch_directory().rstrip(os.sep))
    executor = DeadlineExecutor.of(os.path.abspath(directory))
    try:
        with contextlib.suppress(OSError, ConfigError, StoreError):
            key = executor.call(lambda: _read(directory, fingerprint))
            if key is not None:
                internals.set_torch_key(key)
                return
        torch_key: bytes = internals.torch_key.get()()
        with contextlib.suppress(OSError, ConfigError, StoreError):
            executor.call(lambda: _write(directory, fingerprint, torch_key))
    finally:
        executor.release()


def _read(directory: str, fingerprint: str) -> bytes | None:
    """Return the hash kept in a regular file that this user alone can write, if it fits."""
    place = Directory.at(directory)
    fd = os.open(_FILE, _OLD, dir_fd=place.fd)
    try:
        status = os.fstat(fd)
        is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        may_be_written = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        # With a second name it is a file that was made to be something else.
        if not is_ours or may_be_written or status.st_nlink != 1 or status.st_size > _MAX_BYTES:
            return None
        known = json.loads(os.read(fd, _MAX_BYTES))
        key = bytes.fromhex(known["torch_key"])
        fits = known["fingerprint"] == fingerprint and len(key) == hashlib.sha256().digest_size
        return key if fits else None
    except (LookupError, RecursionError, TypeError, ValueError):
        return None
    finally:
        os.close(fd)


def _write(directory: str, fingerprint: str, torch_key: bytes) -> None:
    """Replace whatever is there; nothing stays of it where that fails."""
    place = Directory.at(directory)
    staged = f"{_FILE}.{secrets.token_hex(4)}"
    fd = os.open(staged, _NEW, 0o600, dir_fd=place.fd)
    try:
        text = json.dumps({"fingerprint": fingerprint, "torch_key": torch_key.hex()})
        os.write(fd, text.encode())
        with contextlib.suppress(OSError):  # most often it is no directory
            os.rmdir(_FILE, dir_fd=place.fd)
        os.replace(staged, _FILE, src_dir_fd=place.fd, dst_dir_fd=place.fd)
    except BaseException:
        os.unlink(staged, dir_fd=place.fd)
        raise
    finally:
        os.close(fd)


def fingerprint_of(root: str) -> str:
    """Return a digest of names, sizes and times of all source files below ``root``."""
    return hashlib.sha256(repr(sorted(_files(root))).encode()).hexdigest()


def _files(path: str) -> Iterator[tuple[str, int, int]]:
    inner = []
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.name.endswith(_SOURCES):
                try:
                    status = entry.stat()
                except OSError:  # a link to nothing
                    yield entry.path, -1, -1
                else:
                    yield entry.path, status.st_size, status.st_mtime_ns
            elif entry.name not in _SKIPPED and entry.is_dir():
                inner.append(entry.path)
    for each in inner:
        yield from _files(each)
