"""What operators of torch's do in Python, by key: what ``py_impl`` is given, or is written there.

Those tables come before the dispatcher's own while something is traced, and no graph names what is
in them. All are noted when a cache is enabled, and held against what they are now: flat, side by
side, as there are two thousand operators, of which most looks find nothing new.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from s3cache.graph._asked_for import AskedFor
from s3cache.graph._homes import home_of
from s3cache.graph._registered import is_of_torch
from s3cache.graph._whose import ABSENT, is_foreign
from s3cache.torch_api import internals
from s3cache.torch_api.protocols import Operator

__all__ = [
    "Entry",
    "begin_recording",
    "forget_entries",
    "record_entry",
    "remember_tables",
    "replaced_entries",
]


class Entry(NamedTuple):
    """What is now where torch had something else, or nothing.

    Attributes:
        how: it came there.
    """

    place: str
    value: object
    how: str = "was registered anew"


class _Looked:
    """All tables as they are at one moment."""

    def __init__(self, last: _Looked | None = None) -> None:
        self.tables: list[dict[object, object]]
        _asked_for.look()
        self.operators = _asked_for.operators
        self.displaced = _asked_for.displaced
        self.tables = _tables_of(self.operators, last)
        self.sizes = list(map(len, self.tables))
        filled = list(itertools.compress(self.tables, self.sizes))  # one of six
        self.keys = list(itertools.chain.from_iterable(filled))
        self.values = list(itertools.chain.from_iterable(map(dict.values, filled)))

    def is_like(self, other: _Looked) -> bool:
        return (
            self.tables is other.tables
            and not self.displaced
            and not other.displaced
            and self.sizes == other.sizes
            and internals.are_identical(self.values, other.values)
            and internals.are_identical(self.keys, other.keys)
        )

    def begins_like(self, other: _Looked) -> bool:
        """Whether this is all of ``other``, with more operators."""
        count, filled = len(other.tables), len(other.values)
        return (
            count < len(self.tables)
            and internals.are_identical(self.tables[:count], other.tables)
            and not self.displaced
            and not other.displaced
            and self.sizes[:count] == other.sizes
            and internals.are_identical(self.values[:filled], other.values)
            and internals.are_identical(self.keys[:filled], other.keys)
        )

    def entries(self) -> Iterator[tuple[int, object, object]]:
        """The number of its table, the key and the value of each."""
        numbers = itertools.chain.from_iterable(
            map(itertools.repeat, itertools.count(), self.sizes)
        )
        return zip(numbers, self.keys, self.values, strict=True)

    def operator_of(self, number: int) -> object:
        return self.operators[number * len(self.operators) // len(self.tables)]


def _tables_of(operators: Sequence[Operator], last: _Looked | None) -> list[dict[object, object]]:
    """Most looks find no other operators, or some more."""
    if last is None:
        return internals.tables_of(operators)
    if operators is last.operators:
        return last.tables
    count = len(last.operators)
    if not internals.are_identical(operators[:count], last.operators):
        return internals.tables_of(operators)
    return last.tables + internals.tables_of(operators[count:])


# What torch has put there, by table and key. The tables are kept, so that nothing else gets an id.
_of_torch: dict[tuple[int, object], object] = {}
_first: _Looked | None = None
_last: tuple[_Looked, list[Entry]] | None = None
# Whether it was torch that called `py_impl`, by operator and key, while it is watched.
_called_by_torch: dict[tuple[int, object], bool] = {}
_is_watched = False


def remember_tables(*, early: bool) -> None:
    """What torch has put there by now is torch's.

    Args:
        early: whether nobody but torch can have been here yet.
    """
    global _first
    if _first is None:
        _first = _Looked()
        _of_torch.update(
            ((id(_first.tables[number]), key), value)
            for number, key, value in _first.entries()
            if early or not is_foreign(value, "")
        )
    else:
        replaced_entries()  # what came while nobody watched is judged by whose it is


def begin_recording() -> None:
    """From now on :func:`record_entry` is called for each ``py_impl``."""
    global _is_watched
    _is_watched = True


def record_entry(operator: object, key: object, *, by_torch: bool) -> None:
    """``py_impl`` of an operator is called for ``key``, by torch or by somebody else."""
    _called_by_torch[id(operator), key] = by_torch


def forget_entries() -> None:
    """Nobody records any more what is registered."""
    global _is_watched, _last
    _is_watched, _last = False, None
    _called_by_torch.clear()


def replaced_entries() -> list[Entry]:
    """What others than torch have put into the tables of torch's operators, or taken out.

    And what they have put in the place of such an operator.
    """
    global _last
    if _first is None:
        return []
    if _last is None:
        _last = _first, list(_differences(_first))
    had, found = _last
    now = _Looked(had)
    if not now.is_like(had):
        more = _of_more(now, had) if now.begins_like(had) else None
        _last = now, list(_differences(now)) if more is None else [*found, *more]
    return _last[1]


def _differences(now: _Looked) -> Iterator[Entry]:
    left = dict(_of_torch)
    yield from _replaced(now, now.entries(), left)
    if left:
        numbers = {id(table): number for number, table in enumerate(now.tables)}
        for table, key in left:
            if table in numbers and _is_of_torch(operator := now.operator_of(numbers[table])):
                yield Entry(f"{operator} for {key}", ABSENT)
    for place, value in now.displaced:
        yield Entry(place, ABSENT if value is None else value, "was replaced")


def _of_more(now: _Looked, had: _Looked) -> list[Entry]:
    """Those of operators that were asked for since."""
    return list(_replaced(now, itertools.islice(now.entries(), len(had.values), None), {}))


def _replaced(
    now: _Looked,
    entries: Iterable[tuple[int, object, object]],
    left: dict[tuple[int, object], object],
) -> Iterator[Entry]:
    for number, key, value in entries:
        place = id(now.tables[number]), key
        had = left.pop(place, ABSENT)
        if value is had:
            continue
        operator = now.operator_of(number)
        if had is ABSENT and not _is_users(operator, key, value):
            _of_torch[place] = value
        elif _is_of_torch(operator):
            yield Entry(f"{operator} for {key}", value)


def _is_users(operator: object, key: object, value: object) -> bool:
    by_torch = _called_by_torch.get((id(operator), key))
    if by_torch is None and _is_watched:
        return True  # written past `py_impl`, as torch itself never does
    if by_torch is None and isinstance(operator, internals.operator.get()):
        # Nobody watched. Torch itself, when imported, gives an operator what is called like it.
        name = operator.name().rpartition("::")[2].partition(".")[0]
        return getattr(value, "__name__", "") != name or is_foreign(value, "")
    return by_torch is False or is_foreign(value, "")


def _is_of_torch(operator: object) -> bool:
    if internals.is_higher_order(operator):
        return home_of(type(operator)).kind == "torch"
    name = operator if isinstance(operator, str) else internals.full_name(operator)
    return "::" not in name or is_of_torch(name)


_asked_for = AskedFor(_is_of_torch)
