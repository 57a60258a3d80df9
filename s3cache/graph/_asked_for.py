"""All operators that this process has asked for, each in its place: ``torch.ops.aten.silu``.

Only those can be changed from Python. There are thousands, and most looks find what the last one
did: so a look asks how much there is by now, and whether all that is known is still in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from operator import is_
from typing import NamedTuple, cast

from s3cache.torch_api import internals
from s3cache.torch_api.protocols import Operator

__all__ = ["AskedFor", "Displaced"]


class Displaced(NamedTuple):
    """What is now in the place of an operator of torch's, or of a namespace with such ones.

    Attributes:
        place: as programs write it.
        value: ``None`` if nothing is there. torch would make it anew, without what its modules
            have given to the old one.
    """

    place: str
    value: object


class AskedFor:
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
        self.displaced: list[Displaced] = []

    def look(self) -> None:
        """See what has come, and what is no longer in its place."""
        import torch

        self._spaces.look([vars(torch.ops)])
        self._packets.look(self._spaces.insides())
        self._singles.look([*self._packets.insides(), internals.higher_order_operators()])
        self._higher.look([internals.higher_order_namespace()])
        self.operators = cast("list[Operator]", self._singles.values)
        levels = (self._spaces, self._packets, self._singles, self._higher)
        self.displaced = list(chain.from_iterable(level.displaced for level in levels))


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
        self.displaced: list[Displaced] = []

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
                self.displaced.append(Displaced(_place_of(had), now))
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
