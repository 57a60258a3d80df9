"""Notice whether the result of a trace depends on the order of a set.

Strings, and objects by address, have other hashes in each process, so equal sets have other orders.
Most frames only ask whether an item is in a set. Dynamo keeps the items of a set in trackers, which
it compares to find one; whatever else it does with an item, it reads ``vt`` of its tracker. The
items of a set that a frame makes are in the order of its code, until Dynamo puts their trackers
into a set of Python: then it asks for the hash of each.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any, Final

from s3cache.graph import PLAIN_KINDS

#: Whether strings have other hashes in each process.
_HAS_SEED: Final = os.environ.get("PYTHONHASHSEED", "random") == "random"
_NOTE: Final = "s3cache_note"
_IN_PLACE: Final = "s3cache_in_place"


class _OfThread(threading.local):
    is_comparing = False
    is_making = False


_thread = _OfThread()


@contextlib.contextmanager
def making() -> Iterator[None]:
    """Keep the order of items in a block in which Dynamo makes a variable for a set of them."""
    before, _thread.is_making = _thread.is_making, True
    try:
        yield
    finally:
        _thread.is_making = before


def watch(variable: Any, note: Callable[[], None], *, in_place: bool = False) -> None:
    """Call ``note`` when Dynamo reads an item of its variable for a set, other than to compare.

    ``in_place`` says that items are in the order of the code, so that reading them is harmless.
    """
    for tracker in variable.items:
        if _NOTE in vars(tracker):
            tracker.__dict__[_IN_PLACE] &= in_place
        else:
            vars(tracker).update({_NOTE: note, _IN_PLACE: in_place})
            kind: Any = type(tracker)
            tracker.__class__ = _watched(kind)


@functools.cache
def _watched(kind: Any) -> type:
    def silently(method: Callable[..., Any], *args: object) -> Any:
        before, _thread.is_comparing = _thread.is_comparing, True
        try:
            return method(*args)
        finally:
            _thread.is_comparing = before

    class Watched(kind):  # type: ignore[misc]
        @property
        def vt(self) -> object:
            if not (_thread.is_comparing or vars(self)[_IN_PLACE]):
                vars(self)[_NOTE]()
            return vars(self)["vt"]

        def __eq__(self, other: object) -> bool:
            return bool(silently(kind.__eq__, self, other))

        def __hash__(self) -> int:
            if not _thread.is_making:
                self.__dict__[_IN_PLACE] = False
            return int(silently(kind.__hash__, self))

    return Watched


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
