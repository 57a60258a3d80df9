"""Remember torch's hash of its own source from one process to the next.

torch reads and hashes all its Python files in each process that looks up a key. The result only
changes with the files: here it is kept with a fingerprint of their names, sizes and times, which
takes a fraction of the time.

To list three hundred directories takes half as long as to ask for the times of two thousand files.
So the listing is kept, with the time at which each directory was changed, and holds until one of
them is changed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import stat
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias, TypeVar, cast

from s3cache.errors import ConfigError, StoreError
from s3cache.store import DeadlineExecutor, Directory
from s3cache.torch_api import internals

_T = TypeVar("_T")

#: Directories by path, each with when it was changed and the names of its files: as JSON has them.
Listing: TypeAlias = dict[str, tuple[int, list[str]]]

_FILE = "installation.json"
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# Opening a pipe does not wait for a writer.
_OLD = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_BYTES = 1 << 20  # it has a tenth of that
_SKIPPED = ("__pycache__", "lib", "include", "bin", "share")
_SOURCES = (".py", ".so", ".cpp", ".ld")
_ABSENT = array("q", [-1, -1])
# Two changes within one tick of the clock have one time: what is younger may change unseen.
_SETTLED_NS = 2 * 10**9


def remember_installation(directory: str) -> None:
    """Give torch the hash that an earlier process computed; else compute it, and keep it.

    A file that another user may have written is not read, and the process waits neither for a pipe
    nor for a disk that hangs: then the hash is computed, and not kept.
    """
    with _bounded(directory) as call:
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
def _bounded(directory: str) -> Iterator[Callable[[Callable[[], _T]], _T | None]]:
    """Yield a function that makes a call of the disk; ``None`` if that fails or takes too long."""
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
    """Return what is kept; ``{}`` unless it is a regular file that this user alone can write."""
    place = Directory.at(directory)
    fd = os.open(_FILE, _OLD, dir_fd=place.fd)
    try:
        status = os.fstat(fd)
        is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        may_be_written = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        # With a second name it is a file that was made to be something else.
        if not is_ours or may_be_written or status.st_nlink != 1 or status.st_size > _MAX_BYTES:
            return {}
        content: object = json.loads(os.read(fd, _MAX_BYTES))
    except (ValueError, RecursionError):
        return {}
    finally:
        os.close(fd)
    return content if isinstance(content, dict) else {}


def _write(directory: str, value: Mapping[str, object]) -> None:
    """Replace whatever is there; nothing stays of it where that fails."""
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


# -- the source files below a directory


def listing_of(root: str, known: object) -> Listing:
    """Return what is below ``root``: ``known`` if that is a listing of it which still holds."""
    if _holds(root, known):
        return cast("Listing", known)
    return dict(_listed(root))


def state_of(listing: Listing) -> str:
    """Return a digest of names, sizes and times of all files in a listing."""
    numbers = array("q")  # no objects for the garbage collector, busy enough as torch is imported
    for path in sorted(listing):
        _add_states(path, listing[path][1], numbers)
    names = json.dumps([[path, listing[path][1]] for path in sorted(listing)])
    digest = hashlib.sha256(names.encode())
    digest.update(numbers.tobytes())
    return digest.hexdigest()


def _add_states(path: str, names: list[str], numbers: array[int]) -> None:
    """Add the size and time of each file; two numbers of their own for what is not there."""
    try:
        # Names are looked up from the directory's descriptor, in fewer steps than from the root.
        at = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # it is gone since
        numbers.extend(_ABSENT * len(names))
        return
    try:
        for name in names:
            try:
                status = os.stat(name, dir_fd=at)
            except OSError:  # a link to nothing
                numbers.extend(_ABSENT)
            else:
                numbers.append(status.st_size)
                numbers.append(status.st_mtime_ns)
    finally:
        os.close(at)


def settled(listing: Listing) -> Listing:
    """Return the listing if any later change will be seen; else an empty one."""
    newest = max((changed for changed, _ in listing.values()), default=0)
    return listing if newest < time.time_ns() - _SETTLED_NS else {}


def _holds(root: str, known: object) -> bool:
    if not isinstance(known, dict) or root not in known:
        return False
    try:
        return all(
            f"{path}/".startswith(f"{root}/")
            and os.stat(path).st_mtime_ns == changed
            and all(isinstance(name, str) for name in names)
            for path, (changed, names) in cast("Mapping[str, tuple[int, list[str]]]", known).items()
        )
    except (AttributeError, OSError, TypeError, ValueError):
        return False


def _listed(path: str) -> Iterator[tuple[str, tuple[int, list[str]]]]:
    changed = os.stat(path).st_mtime_ns  # before: what changes meanwhile is seen next time
    names, inner = [], []
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.name.endswith(_SOURCES):
                names.append(entry.name)
            elif entry.name not in _SKIPPED and entry.is_dir():
                inner.append(entry.path)
    yield path, (changed, sorted(names))
    for each in inner:
        yield from _listed(each)
