"""torch's operators where torch keeps them, and what they do in Python, by key.

What ``py_impl`` is given, or is written there, comes before the dispatcher's own while something is
traced, and no graph names it, nor what stands in an operator's place (``torch.ops.aten.silu``).
Only operators that this process has asked for can be changed from Python. Those are thousands, and
most looks find what the last one did: so a look asks how much there is by now, flat and side by
side, and whether all that is known is still in its place.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import is_
from typing import NamedTuple, cast

from s3cache.graph._distribution import origin_of
from s3cache.graph._registered import is_of_torch
from s3cache.graph._whose import ABSENT, is_foreign
from s3cache.torch_api import internals
from s3cache.torch_api.protocols import Operator

__all__ = [
    "Entry",
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
        if had is ABSENT and not _is_others(operator, value):
            _of_torch[place] = value
        elif _is_of_torch(operator):
            yield Entry(f"{operator} for {key}", value)


def _is_others(operator: object, value: object) -> bool:
    """Return True if others than torch gave it to ``operator``: torch's own bears its name."""
    if isinstance(operator, internals.operator.get()):
        name = operator.name().rpartition("::")[2].partition(".")[0]
        if getattr(value, "__name__", "") != name:
            return True
    return is_foreign(value, "")


def _is_of_torch(operator: object) -> bool:
    if internals.is_higher_order(operator):
        return origin_of(type(operator)).kind == "torch"
    name = operator if isinstance(operator, str) else internals.full_name(operator)
    return "::" not in name or is_of_torch(name)


# -- which operators there are


class _Displaced(NamedTuple):
    """What is now in the place of an operator of torch's, or of a namespace with such ones.

    Attributes:
        place: as programs write it.
        value: ``None`` if nothing is there. torch would make it anew, without what its modules
            have given to the old one.
    """

    place: str
    value: object


class _AskedFor:
    """The operators that torch has by now.

    Attributes:
        operators: each overload of each, and those of higher order; the same list as long as it
            has the same in it, and a longer one with the same beginning where more have come.
        displaced: what is in the place of others.

    Args:
        is_of_torch: whether torch defines an operator.
    """

    def __init__(self, is_of_torch: Callable[[object], bool]) -> None:
        def has_torchs(space: object) -> bool:
            packet = internals.operator_packet.get()
            return any(type(each) is packet and is_of_torch(each) for each in vars(space).values())

        self._spaces = _Kept(internals.is_kind_of_namespace, lambda *_: False, has_torchs)
        self._packets = _Kept(
            internals.is_kind_of_packet, internals.is_place_of_packet, is_of_torch
        )
        self._singles = _Kept(
            internals.is_kind_of_operator, internals.is_place_of_overload, is_of_torch
        )
        self._higher = _Kept(internals.is_kind_of_operator, lambda *_: False, is_of_torch)
        self.operators: Sequence[Operator] = ()
        self.displaced: list[_Displaced] = []

    def look(self) -> None:
        """See what has come, and what is no longer in its place."""
        import torch

        self._spaces.look([vars(torch.ops)])
        self._packets.look(self._spaces.insides())
        self._singles.look([*self._packets.insides(), internals.higher_order_operators()])
        self._higher.look([internals.higher_order_namespace()])
        self.operators = cast("list[Operator]", self._singles.values)
        levels = (self._spaces, self._packets, self._singles, self._higher)
        self.displaced = list(itertools.chain.from_iterable(level.displaced for level in levels))


class _Kept:
    """What lies by name in some dictionaries, of all objects of some kinds.

    Attributes:
        values: all of them, with those that are in the place of torch's.
        displaced: the latter, and what is not there any more.

    Args:
        is_wanted: whether a kind is one of those.
        is_place_of_one: whether torch keeps one there, by dictionary and name.
        is_of_torch: whether torch has put it there; asked of names, too, where it is not known.
    """

    def __init__(
        self,
        is_wanted: Callable[[type], bool],
        is_place_of_one: Callable[[dict[str, object], str], bool],
        is_of_torch: Callable[[object], bool],
    ) -> None:
        self._is_wanted = is_wanted
        self._is_place_of_one = is_place_of_one
        self._is_of_torch = is_of_torch
        self._homes: Sequence[dict[str, object]] = ()
        self._sizes: list[int] = []
        self._known: set[tuple[int, str]] = set()  # which dictionary, by id, and the name there
        # In which dictionary each lies, its name there, and what was there first: the full name of
        # what is torch's, if that was something else.
        self._where: list[dict[str, object]] = []
        self._names: list[str] = []
        self._first: list[object] = []
        self._insides: list[dict[str, object]] = []
        self.values: list[object] = []
        self.displaced: list[_Displaced] = []

    def look(self, homes: Sequence[dict[str, object]]) -> None:
        there = map(dict.get, self._where, self._names)
        if self.displaced or not all(map(is_, there, self._first)):
            self._settle()
        sizes = list(map(len, homes))
        if sizes != self._sizes or not internals.are_identical(homes, self._homes):
            self._grow(homes, sizes)

    def insides(self) -> list[dict[str, object]]:
        """What lies in each of the values."""
        if len(self._insides) < len(self.values):
            self._insides = [*self._insides, *map(vars, self.values[len(self._insides) :])]
        return self._insides

    def _grow(self, homes: Sequence[dict[str, object]], sizes: list[int]) -> None:
        """There is more than at the last look, or something else."""
        had = dict(zip(map(id, self._homes), self._sizes, strict=False))
        count = len(self._first)
        for home, size in zip(homes, sizes, strict=True):
            if had.get(id(home)) != size:
                self._see(home)
        self._homes, self._sizes = homes, sizes
        new = self._first[count:]
        if any(type(each) is str for each in new):
            self._settle()
        else:
            self.values = [*self.values, *new]

    def _see(self, home: dict[str, object]) -> None:
        for name, value in list(home.items()):
            if (id(home), name) in self._known:
                continue
            if self._is_wanted(type(value)) or self._is_place_of_one(home, name):
                whole = internals.full_name_there(home, name)
                self._add(home, name, value if self._is_one_called(value, whole) else whole)

    def _is_one_called(self, value: object, name: str) -> bool:
        return self._is_wanted(type(value)) and internals.full_name(value) == name

    def _settle(self) -> None:
        """Some are not in their places; what is not torch's may leave its own."""
        found = list(zip(self._where, self._names, self._first, strict=True))
        self._where, self._names, self._first, self.displaced = [], [], [], []
        others: list[object] = []
        for home, name, had in found:
            now = home.get(name)
            if type(had) is str and self._is_one_called(now, had):
                had = now
            if now is not had and not self._is_of_torch(had):
                self._known.discard((id(home), name))
                continue
            self._add(home, name, had)
            if now is not had:
                self.displaced.append(_Displaced(_place_of(had), now))
                if self._is_wanted(type(now)):
                    others.append(now)
        self.values = [*(each for each in self._first if type(each) is not str), *others]
        self._insides, self._sizes = [], []

    def _add(self, home: dict[str, object], name: str, value: object) -> None:
        self._known.add((id(home), name))
        self._where.append(home)
        self._names.append(name)
        self._first.append(value)


def _place_of(had: object) -> str:
    return f"torch.ops.{had if type(had) is str else internals.full_name(had)}".replace("::", ".")


_asked_for = _AskedFor(_is_of_torch)
