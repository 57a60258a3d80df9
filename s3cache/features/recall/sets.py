"""Notice whether the result of a trace depends on the order of a set.

Strings, and objects by address, have other hashes in each process, so equal sets have other orders.
Most frames only ask whether an item is in a set. Dynamo keeps the items of a set in trackers, which
it compares to find one; whatever else it does with an item, it reads ``vt`` of its tracker.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Collection
from typing import Any, Final

from s3cache.graph import PLAIN_KINDS

#: Whether strings have other hashes in each process.
_HAS_SEED: Final = os.environ.get("PYTHONHASHSEED", "random") == "random"
_NOTE: Final = "s3cache_note"


class _OfThread(threading.local):
    is_comparing = False


_thread = _OfThread()


def watch(variable: Any, note: Callable[[], None]) -> None:
    """Call ``note`` when Dynamo reads an item of its variable for a set, other than to compare."""
    for tracker in variable.items:
        if _NOTE not in vars(tracker):
            vars(tracker)[_NOTE] = note
            kind: Any = type(tracker)
            tracker.__class__ = _watched(kind)


@functools.cache
def _watched(kind: Any) -> type:
    def silently(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: object) -> object:
            before, _thread.is_comparing = _thread.is_comparing, True
            try:
                return method(*args)
            finally:
                _thread.is_comparing = before

        return call

    def read(self: Any) -> object:
        if not _thread.is_comparing:
            vars(self)[_NOTE]()
        return vars(self)["vt"]

    compared = {"__eq__": silently(kind.__eq__), "__hash__": silently(kind.__hash__)}
    return type(kind.__name__, (kind,), {"vt": property(read), **compared})


def is_ordered(values: Collection[object]) -> bool:
    """Return whether the order of a set is the same in each process."""
    numbers = (int, float, complex)
    return len(values) < 2 or not _HAS_SEED or all(isinstance(it, numbers) for it in values)


def places_in_order(values: Collection[Any]) -> list[int]:
    """Return the places of the items of a set, in an order that all processes share."""

    def text(place: int) -> str:
        item = items[place]
        if type(item) in PLAIN_KINDS or type(item) is tuple:
            return repr(item)
        named = item if hasattr(item, "__qualname__") else type(item)
        return f"{getattr(named, '__module__', '')} {named.__qualname__}"

    items = [*values]
    return sorted(range(len(items)), key=text)
