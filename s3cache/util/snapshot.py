"""Remember which objects are in many places, and say later which places hold others.

Objects are compared by identity, never by what they claim to equal, and side by side in flat
lists: a look at fifty thousand takes about a millisecond. Nothing here knows torch, and nothing is
imported that torch has not imported: where a cache is asked for, ``import torch`` brings this.
"""

from __future__ import annotations

import types
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator
from itertools import accumulate, chain, compress, count
from operator import attrgetter, is_, is_not, ne
from typing import Generic, TypeVar

__all__ = ["ABSENT", "FUNCTIONS", "Functions", "Snapshot", "are_identical", "content_of"]

#: Stands for what is not there.
ABSENT = object()

_T = TypeVar("_T")


def are_identical(some: Collection[object], others: Collection[object]) -> bool:
    """Return True if both hold the very same objects in the same order."""
    return len(some) == len(others) and all(map(is_, some, others))


def content_of(cell: types.CellType) -> object:
    """Return what a variable of a closure is bound to, :data:`ABSENT` if to nothing."""
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


class Snapshot(Generic[_T]):
    """The objects in many containers, such as dictionaries and their views, as last seen.

    They lie in one list, as more lists would cost a look of the garbage collector.
    """

    def __init__(self) -> None:
        self._owners: list[_T] = []
        self._views: list[Collection[object]] = []
        self._sizes: list[int] = []
        self._flat: list[object] = []

    def add(self, owner: _T, *views: Collection[object]) -> None:
        """Watch more containers; ``owner`` is what :meth:`changed` returns for them."""
        for view in views:
            there = list(view)
            self._owners.append(owner)
            self._views.append(view)
            self._sizes.append(len(there))
            self._flat += there

    def changed(self) -> list[_T]:
        """Return the owners of containers that differ from the last look; this look is the next."""
        sizes, views = list(map(len, self._views)), self._views
        resized = list(compress(count(), map(ne, sizes, self._sizes)))
        starts = list(accumulate(self._sizes, initial=0))
        if resized:  # keep the lists side by side where others have grown or shrunk
            views = views.copy()
            for number in resized:
                views[number] = self._flat[starts[number] : starts[number + 1]]
        changed = set(resized)
        present = chain.from_iterable(compress(views, self._sizes))  # most tables are empty
        differs = bytes(map(is_not, present, self._flat))  # one for each that is another
        place = differs.find(1)
        while place >= 0:
            number = bisect_right(starts, place) - 1
            changed.add(number)
            place = differs.find(1, starts[number + 1])
        for number in sorted(changed, reverse=True):  # the last first: places before it stay
            there = list(self._views[number])
            self._flat[starts[number] : starts[number + 1]] = there
            self._sizes[number] = len(there)
        return list({id(each): each for each in map(self._owners.__getitem__, changed)}.values())


class Functions:
    """The code, defaults and closures of functions, and of those that they wrap."""

    def __init__(self) -> None:
        self._seen: set[int] = set()  # of functions and cells, which are kept
        self._functions: list[types.FunctionType] = []
        self._codes: list[types.CodeType] = []
        # Of those that have some; to give some to another function changes no call that worked.
        self._with_defaults: list[types.FunctionType] = []
        self._defaults: list[tuple[object, ...]] = []
        self._with_keywords: list[types.FunctionType] = []
        self._keywords: list[dict[str, object]] = []
        self._in_keywords: list[tuple[object, ...]] = []  # names and values, as those may change
        self._cells: list[types.CellType] = []
        self._contents: list[object] = []
        self._closures: list[types.FunctionType] = []  # one for each cell

    def add(self, values: Iterable[object]) -> None:
        """Take those of ``values`` that are functions, or hold some, as they are now."""
        waiting = list(values)
        while waiting:
            value = waiting.pop()
            kind = type(value)
            if kind is types.FunctionType:
                if id(value) not in self._seen:
                    self._add(value, waiting)  # type: ignore[arg-type]
            elif kind in _HOLDERS:
                waiting.append(value.__func__)  # type: ignore[attr-defined]
            elif kind is property:
                waiting += (value.fget, value.fset, value.fdel)  # type: ignore[attr-defined]

    def _add(self, function: types.FunctionType, waiting: list[object]) -> None:
        self._seen.add(id(function))
        self._functions.append(function)
        self._codes.append(function.__code__)
        if function.__code__.co_filename.startswith("<"):
            return  # such as Python makes for data classes
        if function.__defaults__:
            self._with_defaults.append(function)
            self._defaults.append(function.__defaults__)
        if function.__kwdefaults__:
            self._with_keywords.append(function)
            self._keywords.append(function.__kwdefaults__)
            self._in_keywords.append(_inside(function))
        for cell in function.__closure__ or ():
            content = content_of(cell)
            if id(cell) not in self._seen and content is not ABSENT:
                self._seen.add(id(cell))
                self._cells.append(cell)
                self._contents.append(content)
                self._closures.append(function)
                waiting.append(content)

    def changed(self) -> Iterator[tuple[types.FunctionType, types.CellType | None]]:
        """Yield functions that are not as they were added, with the cell if it is that."""
        if self._is_unchanged():
            return
        for function, code in zip(self._functions, self._codes, strict=True):
            if function.__code__ is not code:
                yield function, None
        for function, defaults in zip(self._with_defaults, self._defaults, strict=True):
            if not are_identical(function.__defaults__ or (), defaults):
                yield function, None
        for function, inside in zip(self._with_keywords, self._in_keywords, strict=True):
            if not are_identical(_inside(function), inside):
                yield function, None
        for cell, content, function in zip(
            self._cells, self._contents, self._closures, strict=True
        ):
            if content_of(cell) is not content:
                yield function, cell

    def _is_unchanged(self) -> bool:
        # Each is asked of thousands, which costs half as much without a line of Python for each.
        try:
            return (
                all(map(is_, map(_code, self._functions), self._codes))
                and all(map(is_, map(_defaults, self._with_defaults), self._defaults))
                and all(map(is_, map(_keywords, self._with_keywords), self._keywords))
                and all(map(is_, map(_content, self._cells), self._contents))
                and are_identical(
                    [*chain.from_iterable(chain.from_iterable(map(dict.items, self._keywords)))],
                    [*chain.from_iterable(self._in_keywords)],
                )
            )
        except ValueError:  # a cell was emptied
            return False


def _inside(function: types.FunctionType) -> tuple[object, ...]:
    return tuple(chain.from_iterable((function.__kwdefaults__ or {}).items()))


_HOLDERS = (staticmethod, classmethod, types.MethodType)
_code, _defaults, _keywords, _content = map(
    attrgetter, ("__code__", "__defaults__", "__kwdefaults__", "cell_contents")
)

#: Functions of torch's, noted as early as the process could.
FUNCTIONS = Functions()
