"""Watch everything of torch's that a program may replace, and say what it has replaced.

Compiling reads namespaces, classes, tables, operators and functions of torch's: some fifty thousand
objects, which are compared with those of the last look.
"""

from __future__ import annotations

import gc
import itertools
import sys
import types
from collections.abc import Collection, Iterator, Mapping
from collections.abc import Set as AbstractSet
from operator import is_
from typing import cast

import _s3cache_autoload
from s3cache.graph._containers import (
    ALTERED,
    AS_A_WHOLE,
    LISTED,
    Constants,
    Container,
    Namespace,
    Operators,
    Override,
    Table,
    by_name,
    is_constant,
    is_kind_of_operator,
    is_torchs_operator,
    kinds_of_tables,
)
from s3cache.graph._origin import assigns, is_foreign
from s3cache.torch_api import internals
from s3cache.torch_api.protocols import Operator
from s3cache.util.importing import is_being_imported
from s3cache.util.snapshot import ABSENT, FUNCTIONS, Snapshot, are_identical

_MAX_DEPTH = 3


class Surface:
    """All of torch's containers and functions that there are by now."""

    def __init__(self) -> None:
        self._containers: Snapshot[Container] = Snapshot()
        self._tables: Snapshot[Operator] = Snapshot()  # of operators
        self._in_tables: dict[int, dict[object, object]] = {}  # what torch has there, by id
        self._filled: set[int] = set()  # tables with values that are watched, by id
        self._overrides: dict[int, list[Override]] = {}  # by the id of a container or operator
        self._listed: set[str] = set()
        self._names: list[str] = []  # of all modules, in order, at the last look
        self._modules: dict[str, types.ModuleType] = {}  # those that make code
        self._seen: set[int] = set()  # of tables and operators, which are kept
        self._rebound: dict[int, bool] = {}  # cells of closures that torch assigns to, by id

    def watch_listed(self, *, trusted: bool = False) -> None:
        """Begin with what is listed by name and imported by now.

        Args:
            trusted: it is certainly as torch has it.
        """
        for place in LISTED:
            module = place.partition(":")[0]
            there = internals.contents(place)
            if place in self._listed or there is None or is_being_imported(module):
                continue
            if internals.makes_code(module) and ":" not in place:
                continue  # it comes with the other modules
            self._listed.add(place)
            self._seen.add(id(there))
            baseline = _s3cache_autoload.baseline.get(place)
            if internals.is_table(place):
                container: Container = Table(place, there)
            else:
                names = cast("Mapping[str, object]", there)
                container = Namespace(place, module, names)
            self._add(container, baseline, trusted=trusted)

    def watch(self, fresh: AbstractSet[str] = frozenset()) -> None:
        """Begin with what is there by now of torch's modules and operators.

        Args:
            fresh: modules that are certainly as torch has them.
        """
        self.watch_listed()
        self._seen.add(id(internals.side_effectful.get()))  # a registry, which has its own check
        for name in self._new_modules():
            module = sys.modules.get(name)
            if not internals.makes_code(name) or type(module) is not types.ModuleType:
                continue
            file = getattr(module, "__file__", None)
            if not isinstance(file, str) or not file.startswith(internals.torch_directory()):
                continue  # Inductor's own products lie in modules of such names, too
            self._modules[name] = module
            members = vars(module)
            baseline = _s3cache_autoload.baseline.get(name)
            self._add(Namespace(name, name, members), baseline, trusted=name in fresh)
            for attribute, value in list(members.items()):
                place = f"{name}.{attribute}"
                is_here = isinstance(value, type) and value.__module__ == name
                if is_here and place != internals.EXCHANGED:
                    self._add(Namespace(place, name, vars(value)), None, trusted=name in fresh)

    def _new_modules(self) -> list[str]:
        names = list(sys.modules)
        count = len(self._names)
        if are_identical(names[:count], self._names):  # what is imported comes last
            new = names[count:]
        else:
            new = [name for name in names if name not in self._modules]
        self._names = names
        return new

    def _add(
        self, container: Container, first: Mapping[object, object] | None, *, trusted: bool
    ) -> None:
        found = container.start(None if first is None else dict(first), trusted=trusted)
        self._containers.add(container, *container.views())
        self._enter(container, found)

    def _enter(self, container: Container, found: list[Override]) -> None:
        """Keep what was found in a container, and begin with what it contains."""
        self._overrides.pop(id(container), None)
        if found:
            self._overrides[id(container)] = found
        if isinstance(container, Operators):
            for value in container.first.values():
                self._enter_operator(value)
            return
        FUNCTIONS.add(container.first.values())
        if isinstance(container, Namespace) and internals.makes_code(container.module):
            for name, value in container.first.items():
                if type(value) in kinds_of_tables() and not str(name).startswith("__"):
                    self.add_constants(
                        f"{container.place}.{name}", cast("Collection[object]", value)
                    )

    def add_constants(self, place: str, table: Collection[object], depth: int = 0) -> None:
        """Begin with a table, unless objects in it make it a cache or a registry."""
        if not table or id(table) in self._seen or depth > _MAX_DEPTH:
            return
        inside = by_name(table)
        if not all(map(is_constant, (*inside, *inside.values()))):
            return
        self._seen.add(id(table))
        self._add(Constants(place, table), None, trusted=True)
        for name, value in inside.items():
            if type(value) in kinds_of_tables():
                self.add_constants(f"{place}[{name}]", cast("Collection[object]", value), depth + 1)

    # -- operators

    def watch_operators(self, *, trusted: bool = False) -> None:
        """Begin with the operators that this process has asked for; it may ask for more later."""
        import torch

        self._trusted_operators = trusted
        for inside in (vars(torch.ops), internals.higher_order_operators()):
            if id(inside) not in self._seen:
                self._seen.add(id(inside))
                self._add(Operators("torch.ops", inside), None, trusted=trusted)
        self._trusted_operators = False

    _trusted_operators = False

    def _enter_operator(self, value: object) -> None:
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if not is_kind_of_operator(type(value)):
            self._add(Operators("torch.ops", vars(value)), None, trusted=False)
            return
        operator = cast("Operator", value)
        tables = internals.tables_of((operator,))
        self._tables.add(operator, *tables)
        if any(tables):
            self._look_at_tables(operator, at_first=True)

    def _look_at_tables(self, operator: Operator, *, at_first: bool = False) -> None:
        """See what was given to an operator (`py_impl`), or written into its tables."""
        found = []
        for table in internals.tables_of((operator,)):
            first = self._in_tables.get(id(table), {})
            if table and id(table) not in self._filled:  # nine of ten stay empty
                self._filled.add(id(table))
                self._tables.add(operator, table.values())
            for key in {**first, **table}:
                had, value = first.get(key, ABSENT), table.get(key, ABSENT)
                if value is had:
                    continue
                is_torchs = self._trusted_operators or not (
                    is_foreign(value) or (not at_first and not _bears(operator, value))
                )
                if had is ABSENT and is_torchs:
                    first[key] = value
                else:
                    found.append(Override(f"{operator} for {key}", value, "was registered"))
            if first:
                self._in_tables[id(table)] = first
        self._overrides.pop(id(operator), None)
        if found and is_torchs_operator(operator):
            self._overrides[id(operator)] = found

    # -- what was replaced

    def in_containers(self) -> list[Override]:
        """Return what differs in the containers, and in the tables of operators, watched by now."""
        for container in self._containers.changed():
            self._enter(container, container.compare())
        for operator in self._tables.changed():
            self._look_at_tables(operator)
        return list(itertools.chain.from_iterable(self._overrides.values()))

    def overrides(self, fresh: AbstractSet[str] = frozenset()) -> list[Override]:
        """Return what stands in the places of what torch has, or was added where torch looks.

        Args:
            fresh: see :meth:`watch`.
        """
        self.watch(fresh)
        found = self.in_containers()
        if not all(map(is_, map(sys.modules.get, self._modules), self._modules.values())):
            for name, module in self._modules.items():
                if (now := sys.modules.get(name, module)) is not module:
                    found.append(Override(name, now, AS_A_WHOLE))
        return found + list(self._altered_functions())

    def _altered_functions(self) -> Iterator[Override]:
        for function, cell in FUNCTIONS.changed():
            if cell is None or not self._is_rebound(cell, function):
                module = function.__globals__.get("__name__")
                yield Override(f"{module}.{function.__qualname__}", function, ALTERED)

    def _is_rebound(self, cell: types.CellType, function: types.FunctionType) -> bool:
        """Return True if a function that has the variable assigns to it, as torch's state.

        `function` is one that has it: to find the others takes a tenth of a second.
        """
        if id(cell) not in self._rebound:
            self._rebound[id(cell)] = any(
                each is cell and assigns(holder.__code__, name)
                for holder in itertools.chain((function,), _functions_with(cell))
                for name, each in zip(
                    holder.__code__.co_freevars, holder.__closure__ or (), strict=False
                )
            )
        return self._rebound[id(cell)]


def _bears(operator: Operator, value: object) -> bool:
    """Return True if a function has the name of an operator, as what torch gives to it has."""
    if not isinstance(operator, internals.operator.get()):
        return True
    name = operator.name().rpartition("::")[2].partition(".")[0]
    return getattr(value, "__name__", "") == name


def _functions_with(cell: types.CellType) -> Iterator[types.FunctionType]:
    for closure in gc.get_referrers(cell):
        for function in gc.get_referrers(closure) if type(closure) is tuple else ():
            if isinstance(function, types.FunctionType) and function.__closure__ is closure:
                yield function
