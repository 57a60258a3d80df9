"""torch's hash of its own source, remembered from one process to the next.

torch reads and hashes all its Python files in each process that looks up a key. The result only
changes with the files: here it is kept with a fingerprint of their names, sizes and times, which
takes a fraction of the time, and is computed anew when that differs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from s3cache.errors import ConfigError, StoreError
from s3cache.hooks._tree import listing_of, settled, state_of
from s3cache.store import DeadlineExecutor, Directory
from s3cache.torch_api import internals

__all__ = ["remember_installation"]

_T = TypeVar("_T")

_FILE = "installation.json"
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# A pipe is not waited at for somebody to write.
_OLD = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_BYTES = 1 << 20  # it is 0.1 of that


def remember_installation(directory: str) -> None:
    """Give torch the hash that an earlier process computed; else compute it, and keep it.

    Nothing is read that another user may have written, and nobody waits for what is no file, or
    for a disk that hangs: then it is computed, and not kept.
    """
    with _patiently(directory) as call:
        known = call(lambda: _read(directory)) or {}
        listing = listing_of(internals.torch_directory().rstrip(os.sep), known.get("listing"))
        fingerprint = state_of(listing)
        if known.get("fingerprint") == fingerprint:
            with contextlib.suppress(ValueError):  # not hexadecimal
                key = bytes.fromhex(str(known.get("torch_key")))
                if len(key) == hashlib.sha256().digest_size:
                    internals.set_torch_key(key)
                    return
        new = {
            "fingerprint": fingerprint,
            "torch_key": internals.torch_key.get()().hex(),
            "listing": settled(listing),
        }
        call(lambda: _write(directory, new))


@contextlib.contextmanager
def _patiently(directory: str) -> Iterator[Callable[[Callable[[], _T]], _T | None]]:
    """A function that makes a call of the disk; ``None`` where that fails, or takes too long."""
    executor = DeadlineExecutor.of(os.path.abspath(directory))

    def call(work: Callable[[], _T]) -> _T | None:
        with contextlib.suppress(OSError, ConfigError, StoreError):
            return executor.call(work)
        return None

    try:
        yield call
    finally:
        executor.release()


def _read(directory: str) -> dict[str, object]:
    """What is kept there; nothing where it is not ours, or is no file of ours alone."""
    place = Directory.at(directory)
    fd = os.open(_FILE, _OLD, dir_fd=place.fd)
    try:
        found = os.fstat(fd)
        is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
        may_be_written = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        # Under another name as well it is a file that was made to be something else.
        if not is_ours or may_be_written or found.st_nlink != 1 or found.st_size > _MAX_BYTES:
            return {}
        content: object = json.loads(os.read(fd, _MAX_BYTES))
    except (ValueError, RecursionError):
        return {}
    finally:
        os.close(fd)
    return content if isinstance(content, dict) else {}


def _write(directory: str, value: Mapping[str, object]) -> None:
    """Keep it there, in the place of whatever is there; nothing of it stays where that fails."""
    place = Directory.at(directory)
    staged = f"{_FILE}.{secrets.token_hex(4)}"
    fd = os.open(staged, _NEW, 0o600, dir_fd=place.fd)
    try:
        os.write(fd, json.dumps(value).encode())
        with contextlib.suppress(OSError):  # most often it is no directory
            os.rmdir(_FILE, dir_fd=place.fd)
        os.replace(staged, _FILE, src_dir_fd=place.fd, dst_dir_fd=place.fd)
    except BaseException:
        os.unlink(staged, dir_fd=place.fd)
        raise
    finally:
        os.close(fd)
