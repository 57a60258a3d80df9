"""Watch everything in torch that a program may replace, and find the replacements.

Compiling reads namespaces, classes, tables, functions and operators of torch: some fifty thousand
objects. A look examines only the containers that were written to since the last look.
"""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Collection, Mapping
from operator import is_
from typing import NamedTuple, cast

import _s3cache_process
from s3cache.graph._describe import UnidentifiedError, digest_of, identity
from s3cache.graph._origin import (
    SCALARS,
    are_same_method,
    codes_in,
    is_code,
    is_constant,
    is_foreign,
    is_named_as,
    is_of_others,
    is_operator_of_torch,
    is_plain,
    is_same_value,
    kinds_of_tables,
    kinds_of_values,
    own_name,
    unwrap_patch,
)
from s3cache.torch_api import internals
from s3cache.torch_api.protocols import Operator
from s3cache.util.snapshot import ABSENT, FUNCTIONS, Snapshot, are_identical, assigns

_LISTED = (*_s3cache_process.IMPORT_POINTS, *internals.LATER_PLACES)
_PYTHON = ("cmath", "math", "operator")
# Names that Dynamo adds to the module of a function that it compiled, such as `torch.cond`. Only
# the compiled code of that function uses them.
_DYNAMOS = ("__compiled_fn_", "__resume_at_")


REPLACED = "was replaced"


class Override(NamedTuple):
    """A value that replaces torch's own."""

    place: str
    value: object  # ABSENT if it was removed; its file if only that is known
    how: str = REPLACED


# In place of a foreign value that was there at the first look.
_UNKNOWN = object()
#: Kinds of overrides that do not determine the new behaviour.
ALTERED, AS_A_WHOLE = "was altered", "was replaced as a whole"


class Container:
    """A container of torch, and its original content."""

    def __init__(self, place: str, inside: Collection[object]) -> None:
        self.place = place
        self.inside = inside
        self.first: dict[object, object] = {}  # the original content, by name

    @property
    def watched(self) -> Collection[object]:
        """The object that a snapshot watches."""
        if type(self.inside) is internals.ordered_set.get():
            return internals.inside_of_ordered_set(self.inside)
        return self.inside

    def start(self, first: dict[object, object] | None) -> list[Override]:
        """Begin with the known original content, or with values that look like torch's."""
        if first is not None:
            self.first = first
            return self.compare()
        now = internals.by_name(self.inside)
        others = [name for name, value in now.items() if self.is_foreign_at_first(name, value)]
        found = [self._override(name, unwrap_patch(now[name])) for name in others]
        self.first = {**now, **dict.fromkeys(others, _UNKNOWN)}
        return found

    def compare(self) -> list[Override]:
        """Return the values that now replace torch's own."""
        now, found = internals.by_name(self.inside), []
        if are_identical(now.values(), self.first.values()) and list(now) == list(self.first):
            return []
        for name in {**self.first, **now}:
            old, new = self.first.get(name, ABSENT), now.get(name, ABSENT)
            if old is new:
                continue
            old, new = unwrap_patch(old), unwrap_patch(new)
            is_same = old is new or are_same_method(old, new)
            if not is_same and self.is_override(name, old, new):
                found.append(self._override(name, new))
        return found

    def settled(self) -> dict[object, object]:
        """Return the known original content, without numbers that torch changes at run time."""
        return {name: value for name, value in self.first.items() if value is not _UNKNOWN}

    def _override(self, name: object, value: object) -> Override:
        return Override(f"{self.place}.{name}", value)

    def is_foreign_at_first(self, name: object, value: object) -> bool:
        return is_foreign(value)

    def is_override(self, name: object, old: object, new: object) -> bool:
        raise NotImplementedError


class Table(Container):
    """A table in which torch looks functions up; every value in it may be used."""

    def is_foreign_at_first(self, name: object, value: object) -> bool:
        is_own = self.place.startswith(internals.DECOMPOSITIONS) and is_of_others(name)
        return not is_own and is_foreign(value)

    def is_override(self, name: object, old: object, new: object) -> bool:
        if old is ABSENT:
            return self.is_foreign_at_first(name, new)
        if new is ABSENT:
            return is_code(old) and not self._is_never_read(name)
        return (is_code(old) or is_code(new)) and not _is_same_code(old, new)

    def _is_never_read(self, name: object) -> bool:
        """Return True for rules that ``ExportedProgram.run_decompositions`` removes."""
        return self.place == internals.FAKE_RULES and internals.is_decomposed_first(name)


class Namespace(Container):
    """A module or a class."""

    inside: Mapping[str, object]

    def __init__(self, place: str, module: str, inside: Mapping[str, object]) -> None:
        super().__init__(place.replace(":", "."), inside)
        self.module = module
        self._listed_as = place if place in _LISTED else ""
        self._makes_code = internals.makes_code(module)

    def is_foreign_at_first(self, name: object, value: object) -> bool:
        return type(value) not in SCALARS and is_foreign(unwrap_patch(value), surveyed=True)

    def is_override(self, name: object, old: object, new: object) -> bool:
        if str(name).startswith(_DYNAMOS) or (self._listed_as and name in internals.NOT_COMPILED):
            return False
        if old is ABSENT:
            return self._is_override_if_added(str(name), new)
        if new is ABSENT:
            return bool(self._listed_as) and is_code(old)
        if self._is_code(old) and self._is_code(new):
            return not _is_same_code(old, new)
        if is_foreign(new):
            return True
        if self.module in _PYTHON or (self._listed_as and (is_code(old) or is_code(new))):
            return True
        return self._makes_code and self._is_changed_value(str(name), old, new)

    def _is_code(self, value: object) -> bool:
        return is_code(value) or (self._makes_code and isinstance(value, types.ModuleType))

    def _is_override_if_added(self, name: str, new: object) -> bool:
        if self._listed_as and internals.is_shadowed(self._listed_as, name):
            return True
        if not self._makes_code:
            return False
        hides_bases = self.place != self.module and self._is_changed_value(name, ABSENT, new)
        return hides_bases or is_foreign(new)

    def _is_changed_value(self, name: str, old: object, new: object) -> bool:
        """Return True if a program, not torch, has set another number, text or table."""
        kinds = kinds_of_values()
        if name.startswith("__") or (type(old) not in kinds and type(new) not in kinds):
            return False
        return not is_same_value(old, new) and not self._is_state(name)

    def _is_state(self, name: str) -> bool:
        """Return True if torch's own code assigns to it."""
        codes = codes_in(self.inside, vars(sys.modules[self.module]))
        return any(assigns(each, name) for each in codes)

    def settled(self) -> dict[object, object]:
        # Other values of torch are the same in every process at this point.
        return {
            name: value
            for name, value in super().settled().items()
            if type(value) not in (int, float) or not self._is_state(str(name))
        }


def _is_same_code(old: object, new: object) -> bool:
    """Return True if torch made the same function again, or only hid it from Dynamo."""
    if internals.is_kept_from_dynamo(new, old):
        return True
    name = own_name(old)
    if name is not None and name == own_name(new):
        return True
    if type(old) is not type(new) or isinstance(new, type):
        return False
    try:
        return identity(old) == identity(new)
    except UnidentifiedError:
        return False


class Constants(Container):
    """A dictionary, list or set of constants, functions and operators."""

    def _override(self, name: object, value: object) -> Override:
        return Override(f"{self.place}[{name}]", value)

    def is_foreign_at_first(self, name: object, value: object) -> bool:
        return False

    def compare(self) -> list[Override]:
        found = super().compare()
        there = [name for name in internals.by_name(self.inside) if name in self.first]
        if type(self.inside) not in (list, set) and there != [n for n in self.first if n in there]:
            found.append(Override(f"{self.place}[in another order]", there))
        return found

    def is_override(self, name: object, old: object, new: object) -> bool:
        if is_same_value(old, new):
            return False
        if type(old) is int and type(new) is int and isinstance(self.inside, list):
            return False  # a counter of Python in a container that cannot be assigned to
        if old is not ABSENT:
            return True
        # At run time torch adds its own operators and functions, but no new numbers.
        everything = (name, new, *self.first, *self.first.values())
        return is_foreign(new) or all(
            isinstance(each, SCALARS) or internals.is_dtype(each) for each in everything
        )


def _is_starting(module: types.ModuleType | None) -> bool:
    """Return True if the code of a module has not run to its end yet."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


class Surface:
    """All containers and functions of torch that exist so far."""

    def __init__(self) -> None:
        self._containers: Snapshot[Container] = Snapshot(internals.dict_version.get)
        self._overrides: dict[int, list[Override]] = {}  # by the id of a container
        self._listed: set[str] = set()
        self._present: dict[str, int] = {}  # ids of all modules at the last look, by name
        self._modules: dict[str, types.ModuleType] = {}  # modules that generate code
        self._seen: set[int] = set()  # ids of tables, which are kept alive
        self._empty: dict[str, tuple[Collection[object], int]] = {}  # empty tables, by place
        #: Content at the first look of unknown origin: digests of modules, classes and tables, and
        #: values in tables, by place.
        self.unknown: dict[str, str] = {}

    def _watch_listed(self) -> None:
        for place in _LISTED:
            module = place.partition(":")[0]
            there = internals.contents(place)
            if place in self._listed or there is None or _is_starting(sys.modules.get(module)):
                continue
            if internals.makes_code(module) and ":" not in place:
                continue  # watched with the other modules
            if ":" in place and isinstance(there, dict):
                container: Container = Table(place, there)
            else:
                names = cast("Mapping[str, object]", there)
                container = Namespace(place, module, names)
            self._add(container, place)
            self._listed.add(place)
            self._seen.add(id(there))

    def _watch(self) -> None:
        """Begin with the modules of torch that are imported so far."""
        self._watch_listed()
        for place, (table, depth) in [*self._empty.items()]:
            if _s3cache_process.baseline.get(place):
                del self._empty[place]
                self.add_constants(place, table, depth)
        self._seen.add(id(internals.side_effectful.get()))  # a registry with a separate check
        for name, module in sys.modules.copy().items():
            if self._present.get(name) == id(module):
                continue
            if name != internals.COMPILER and _is_starting(module):  # the compiler has run
                continue
            file = getattr(module, "__file__", None)
            # Code that Inductor generated has such module names, too.
            is_torchs = isinstance(file, str) and file.startswith(internals.torch_directory())
            if is_torchs and name not in self._modules and internals.makes_code(name):
                self._watch_module(name, module)
            self._present[name] = id(module)  # last, in case something fails before

    def _watch_module(self, name: str, module: types.ModuleType) -> None:
        if type(module) is not types.ModuleType:
            return
        members = vars(module)
        self._add(Namespace(name, name, members), name)
        for attribute, value in list(members.items()):
            place = f"{name}.{attribute}"
            is_here = isinstance(value, type) and value.__module__ == name
            if is_here and place != internals.EXCHANGED:
                self._add(Namespace(place, name, vars(value)), place)
        self._modules[name] = module

    def _add(self, container: Container, place: str) -> None:
        self._containers.add(container, container.watched)  # first, so that no write is missed
        first = _s3cache_process.baseline.get(place.replace(":", "."))
        found = container.start(first)
        if first is None:
            self.unknown[place] = digest_of(container.settled())
        elif isinstance(container, Constants) and all(is_plain(each.value) for each in found):
            # Other modules of torch fill some tables during their import.
            self.unknown.update((each.place, repr(each.value)) for each in found)
            container.first, found = internals.by_name(container.inside), []
        self._enter(container, found)
        FUNCTIONS.add(container.first.values())
        if isinstance(container, Namespace) and internals.makes_code(container.module):
            kinds = kinds_of_tables()
            for name, value in container.first.items():
                if type(value) in kinds and not str(name).startswith("__"):
                    table = cast("Collection[object]", value)
                    self.add_constants(f"{container.place}.{name}", table)

    def _enter(self, container: Container, found: list[Override]) -> None:
        self._overrides.pop(id(container), None)
        if found:
            self._overrides[id(container)] = found

    def add_constants(self, place: str, table: Collection[object], depth: int = 0) -> None:
        """Begin with a table, unless objects in it make it a cache or a registry."""
        if id(table) in self._seen or depth > _s3cache_process.MAX_DEPTH:
            return
        if not table:
            self._empty[place] = (table, depth)  # until another module of torch fills it
            return
        inside = internals.by_name(table)
        if not all(map(is_constant, (*inside, *inside.values()))):
            return
        self._add(Constants(place, table), place)
        self._seen.add(id(table))
        for name, value in inside.items():
            if type(value) in kinds_of_tables():
                inner = cast("Collection[object]", value)
                self.add_constants(f"{place}[{name}]", inner, depth + 1)

    def overrides(self) -> list[Override]:
        """Return replacements of torch's names, and additions to its tables."""
        self._watch()
        for container in self._containers.changed():
            self._enter(container, container.compare())
        found = list(itertools.chain.from_iterable(self._overrides.values()))
        if not all(map(is_, map(sys.modules.get, self._modules), self._modules.values())):
            for name, module in self._modules.items():
                if (now := sys.modules.get(name, module)) is not module:
                    found.append(Override(name, now, AS_A_WHOLE))
        for function in FUNCTIONS.changed():
            module_name = function.__globals__.get("__name__")
            found.append(Override(f"{module_name}.{function.__qualname__}", function, ALTERED))
        return found


# -- operators


class WatchedOperators:
    """The operators that this process has used so far, with their objects and tables.

    They are in dictionaries: a namespace has operators, an operator has overloads. torch adds them
    at their first use.
    """

    def __init__(self) -> None:
        self._places: Snapshot[dict[str, object]] = Snapshot(internals.dict_version.get)
        self._tables: Snapshot[Operator] = Snapshot(internals.dict_version.get)
        self._first: dict[int, dict[object, object]] = {}  # the original content, by id
        self._overrides: dict[int, list[Override]] = {}  # by the id of a place or an operator
        self._is_trusted = False

    def watch(self, *, trusted: bool) -> None:
        """Begin with the operators that exist so far, which may be ``trusted``.

        Later operators are added automatically.
        """
        import torch

        self._is_trusted = trusted
        self._watch_place(vars(torch.ops))
        self._watch_place(internals.higher_order_operators.get())
        self._is_trusted = False

    def overrides(self) -> list[Override]:
        """Return the differences from the original content, in all places and tables."""
        for inside in self._places.changed():
            self._look_at_place(inside)
        for operator in self._tables.changed():
            self._look_at_tables(operator)
        return list(itertools.chain.from_iterable(self._overrides.values()))

    def _watch_place(self, inside: dict[str, object]) -> None:
        if id(inside) not in self._first:
            self._first[id(inside)] = {}
            self._places.add(inside, inside)
            self._look_at_place(inside)

    def _look_at_place(self, inside: dict[str, object]) -> None:
        first, found = self._first[id(inside)], []
        for name in [*first.keys() - inside.keys(), *list(inside)]:
            old, new = first.get(name, ABSENT), inside.get(cast("str", name), ABSENT)
            if old is new:
                continue
            whole = internals.full_name_there(inside, str(name))
            override = Override(f"torch.ops.{whole}".replace("::", "."), new)
            if old is not ABSENT and is_operator_of_torch(old):
                found.append(override)
            elif internals.kind_of_operator(new) and internals.full_name(new) == whole:
                first[name] = new
                self._watch_operator(new)
            elif old is not ABSENT:
                del first[name]
            elif (
                internals.kind_of_operator(new) or internals.is_place_of_operator(inside, str(name))
            ) and is_operator_of_torch(whole):
                found.append(override)
        self._overrides[id(inside)] = found

    def _watch_operator(self, value: object) -> None:
        if internals.kind_of_operator(value) != "operator":
            self._watch_place(vars(value))
            return
        operator = cast("Operator", value)
        tables = internals.tables_of(operator)
        if id(tables[0]) not in self._first:
            self._first.update((id(table), {}) for table in tables)
            self._tables.add(operator, *tables)
            if any(tables):
                self._look_at_tables(operator, at_first=True)

    def _look_at_tables(self, operator: Operator, *, at_first: bool = False) -> None:
        """Look at rules of an operator, given by `py_impl` or written into its tables."""
        found = []
        for table in internals.tables_of(operator):
            first = self._first.setdefault(id(table), {})
            for key in {**first, **table}:
                had, value = first.get(key, ABSENT), table.get(key, ABSENT)
                if value is had:
                    continue
                is_torchs = self._is_trusted or not (
                    is_foreign(value) or (not at_first and not is_named_as(operator, value))
                )
                if had is ABSENT and is_torchs:
                    first[key] = value
                else:
                    found.append(Override(f"{operator} for {key}", value, "was registered"))
        self._overrides[id(operator)] = found if is_operator_of_torch(operator) else []
