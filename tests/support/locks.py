"""Find every lock in an object of s3cache, under any name."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

_LOCKS = (type(threading.Lock()), type(threading.RLock()))


def locks_of(*roots: object) -> list[Any]:
    """Return the locks of ``roots`` and of their parts, each once.

    For a test that holds them all, including locks that later changes add.
    """
    found: dict[int, Any] = {}
    seen: set[int] = set()
    todo = [*roots]
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, _LOCKS):
            found[id(value)] = value
        else:
            todo.extend(_parts(value))
    return [*found.values()]


def _parts(value: object) -> Iterator[object]:
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from value
    elif type(value).__module__.startswith("s3cache."):
        for kind in type(value).__mro__:
            for name in kind.__dict__.get("__slots__", ()):
                yield getattr(value, name, None)
        yield from getattr(value, "__dict__", {}).values()
