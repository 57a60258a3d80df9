"""The source files below a directory, and whether any of them was changed, added or removed.

To list three hundred directories takes half as long as to ask of two thousand files when they were
changed. So what was listed is kept, with the time at which each directory was changed, and holds
until one of them was changed again.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from array import array
from collections.abc import Iterator, Mapping
from typing import TypeAlias, cast

__all__ = ["Listing", "listing_of", "settled", "state_of"]

#: Directories by path, each with when it was changed and the names of its files: as JSON has them.
Listing: TypeAlias = dict[str, tuple[int, list[str]]]

_SKIPPED = ("__pycache__", "lib", "include", "bin", "share")
_SOURCES = (".py", ".so", ".cpp", ".ld")
_NOTHING = array("q", [-1, -1])
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Two changes of one moment bear one time: what is younger may be changed and not look so.
_SETTLED_NS = 2 * 10**9


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
