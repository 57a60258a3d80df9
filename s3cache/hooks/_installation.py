"""torch's hash of its own source, remembered from one process to the next.

torch reads and hashes all its Python files in each process that looks up a key. The result only
changes with the files: here it is kept with a fingerprint of their names, sizes and times, which
takes a fraction of the time, and is computed again when that differs.

To list three hundred directories takes half as long as to ask of two thousand files when they were
changed. So what was listed is kept, with the time at which each directory was changed, and holds
until one of them was changed again.
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

__all__ = ["Listing", "listing_of", "remember_installation", "settled", "state_of"]

_T = TypeVar("_T")

_FILE = "installation.json"
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# A pipe is not waited at for somebody to write.
_OLD = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_BYTES = 1 << 20  # it is 0.1 of that
#: Directories by path, each with when it was changed and the names of its files: as JSON has them.
Listing: TypeAlias = dict[str, tuple[int, list[str]]]

_SKIPPED = ("__pycache__", "lib", "include", "bin", "share")
_SOURCES = (".py", ".so", ".cpp", ".ld")
_NOTHING = array("q", [-1, -1])
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Two changes of one moment bear one time: what is younger may be changed and not look so.
_SETTLED_NS = 2 * 10**9


def remember_installation(directory: str) -> None:
    """Give torch the hash that an earlier process computed; else compute it, and keep it.

    Nothing is read that another user may have written, and the process waits neither for a pipe nor
    for a disk that hangs: then the hash is computed, and not kept.
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


# -- the source files below a directory


def listing_of(root: str, known: object) -> Listing:
    """What is below ``root``: ``known``, where that is such a listing of it, and still holds."""
    if _holds(root, known):
        return cast("Listing", known)
    return dict(_listed(root))


def state_of(listing: Listing) -> str:
    """A digest of names, sizes and times of all files in it."""
    numbers = array("q")  # no objects for the garbage collector, busy enough as torch is imported
    for path in sorted(listing):
        _add_states(path, listing[path][1], numbers)
    names = json.dumps([[path, listing[path][1]] for path in sorted(listing)])
    digest = hashlib.sha256(names.encode())
    digest.update(numbers.tobytes())
    return digest.hexdigest()


def _add_states(path: str, names: list[str], numbers: array[int]) -> None:
    """The size of each file and when it was changed; two numbers of none for what is not there."""
    try:
        at = os.open(path, _DIRECTORY)  # from there, each file is found in fewer steps
    except OSError:  # it is gone since
        numbers.extend(_NOTHING * len(names))
        return
    try:
        for name in names:
            try:
                status = os.stat(name, dir_fd=at)
            except OSError:  # a link to nothing
                numbers.extend(_NOTHING)
            else:
                numbers.append(status.st_size)
                numbers.append(status.st_mtime_ns)
    finally:
        os.close(at)


def settled(listing: Listing) -> Listing:
    """The listing, if any later change will be seen; an empty one if not."""
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
    changed = os.stat(path).st_mtime_ns  # before: what is changed meanwhile is seen next time
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
