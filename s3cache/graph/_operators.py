"""Watch torch's operators: which object is in each place, and what was registered for it in Python.

The dispatcher keeps kernels where nothing can read them. It only says which keys an operator has
kernels for, and the file that registered each. A kernel is known if it was registered while a cache
was enabled. What torch keeps beside the dispatcher, such as fake implementations, is read from
there.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import cast

import _s3cache_autoload
from s3cache.graph._origin import is_foreign, origin_of
from s3cache.graph._surface import Override
from s3cache.torch_api import internals
from s3cache.torch_api.protocols import Operator
from s3cache.util.snapshot import ABSENT, Snapshot, content_of

_NATIVE = (".c", ".cc", ".cpp", ".cu", ".cuh", ".cxx", ".h", ".hpp", ".mm")
_MAX_DEPTH = 4
_is_kind_of_operator: Callable[[type], bool] = internals.is_kind_of_operator
_is_kind_of_packet: Callable[[type], bool] = internals.is_kind_of_packet
_is_kind_of_namespace: Callable[[type], bool] = internals.is_kind_of_namespace


def is_of_torch(name: str) -> bool:
    """Return True if torch defines the operator: the file decides, and not the namespace.

    Decompositions and fallbacks reach operators that no graph names.
    """
    return name.startswith("aten::") or _is_defined_by_torch(name)


@functools.cache
def _is_defined_by_torch(name: str) -> bool:
    defined = internals.DEFINED_AT.search(internals.dispatch_dump.get()(name))
    if defined is None:
        return False
    if defined[1].startswith(_files_that_register_for_others()):
        definition = internals.custom_operators.get().get(name)
        return definition is not None and origin_of(definition._init_fn).kind == "torch"
    built_in = internals.built_in()
    home = internals.torch_directory()
    return defined[1].startswith((home, built_in) if built_in else home)


@functools.cache
def _files_that_register_for_others() -> tuple[str, ...]:
    home = internals.torch_directory()
    return os.path.join(home, "library.py"), os.path.join(home, "_library") + os.sep


# -- operators as objects


class WatchedOperators:
    """The operators that this process has asked for by now, and their tables.

    They lie in dictionaries: of a namespace of operators, and of each operator its overloads. They
    come there as they are asked for.
    """

    def __init__(self) -> None:
        self._places: Snapshot[dict[str, object]] = Snapshot(internals.dict_version.get)
        self._tables: Snapshot[Operator] = Snapshot(internals.dict_version.get)
        self._first: dict[int, dict[object, object]] = {}  # what torch has in each, by id
        self._overrides: dict[int, list[Override]] = {}  # by the id of a place or an operator
        self._is_trusted = False

    def watch(self, *, trusted: bool) -> None:
        """Begin with the operators that there are by now, which may be ``trusted``.

        Others follow by themselves.
        """
        import torch

        self._is_trusted = trusted
        self._watch_place(vars(torch.ops))
        self._watch_place(internals.higher_order_operators.get())
        self._is_trusted = False

    def overrides(self) -> list[Override]:
        """Return what differs from what torch has, in all places and tables."""
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
            if old is not ABSENT and _is_torchs(old):
                found.append(_override(whole, new))
            elif _is_operator(new) and internals.full_name(new) == whole:
                first[name] = new
                self._watch_operator(new)
            elif old is not ABSENT:
                del first[name]
            elif (_is_operator(new) or _is_place(inside, str(name))) and _is_torchs(whole):
                found.append(_override(whole, new))
        self._keep(inside, found)

    def _keep(self, owner: object, found: list[Override]) -> None:
        self._overrides.pop(id(owner), None)
        if found:
            self._overrides[id(owner)] = found

    def _watch_operator(self, value: object) -> None:
        if not _is_kind_of_operator(type(value)):
            self._watch_place(vars(value))
            return
        operator = cast("Operator", value)
        tables = internals.tables_of((operator,))
        if id(tables[0]) not in self._first:
            self._first.update((id(table), {}) for table in tables)
            self._tables.add(operator, *tables)
            if any(tables):
                self._look_at_tables(operator, at_first=True)

    def _look_at_tables(self, operator: Operator, *, at_first: bool = False) -> None:
        """See what was given to an operator (`py_impl`), or written into its tables."""
        found = []
        for table in internals.tables_of((operator,)):
            first = self._first.setdefault(id(table), {})
            for key in {**first, **table}:
                had, value = first.get(key, ABSENT), table.get(key, ABSENT)
                if value is had:
                    continue
                is_torchs = self._is_trusted or not (
                    is_foreign(value) or (not at_first and not _bears(operator, value))
                )
                if had is ABSENT and is_torchs:
                    first[key] = value
                else:
                    found.append(Override(f"{operator} for {key}", value, "was registered"))
        self._keep(operator, found if _is_torchs(operator) else [])


def _override(name: str, value: object) -> Override:
    return Override(f"torch.ops.{name}".replace("::", "."), value)


def _bears(operator: Operator, value: object) -> bool:
    """Return True if a function has the name of an operator, as what torch gives to it has."""
    if not isinstance(operator, internals.operator.get()):
        return True
    name: str = operator.name().rpartition("::")[2].partition(".")[0]
    return getattr(value, "__name__", "") == name


def _is_place(inside: dict[str, object], name: str) -> bool:
    """Return True if torch keeps an operator under that name, or would."""
    if "_qualified_op_name" in inside:
        return internals.is_place_of_overload(inside, name)
    return "name" in inside and internals.is_place_of_packet(inside, name)


def _is_operator(value: object) -> bool:
    kind = type(value)
    return _is_kind_of_operator(kind) or _is_kind_of_packet(kind) or _is_kind_of_namespace(kind)


def _is_torchs(value: object) -> bool:
    """Return True if torch defines an operator, or one in a namespace; asked of names, too."""
    if internals.is_higher_order(value):
        return origin_of(type(value)).kind == "torch"
    if _is_kind_of_namespace(type(value)):
        packets = (each for each in vars(value).values() if _is_kind_of_packet(type(each)))
        return any(map(_is_torchs, packets))
    name = value if isinstance(value, str) else internals.full_name(value)
    return "::" not in name or is_of_torch(name)


# -- kernels in Python


class _Recorded:
    """Kernels that were registered while a cache was enabled, and what was found of them."""

    def __init__(self, *, is_complete: bool) -> None:
        self.is_complete = is_complete  # since `import torch`: no kernel of torch's was replaced
        self.kernels: dict[str, object] = {}  # by operator and key, as torch has them
        self.count = 0
        self.last: tuple[object, dict[str, object]] | None = None


_recorded = _Recorded(is_complete=True)
_known: dict[int, object] = {}  # functions of torch's, by id: they stay


def record_kernel(where: str, function: object) -> None:
    """Note that `function` is registered from now on, for an operator and key as torch has them.

    It may replace a kernel of torch's, which nothing else shows.
    """
    _recorded.kernels[where] = function
    _recorded.count += 1


def forget_kernels() -> None:
    """Forget what was recorded: from now on kernels may be replaced without a trace."""
    global _recorded
    _recorded = _Recorded(is_complete=False)
    _registered_at.cache_clear()


def replaced_kernels() -> dict[str, object]:
    """Return kernels in Python that others than torch registered for torch's own operators.

    By operator and key, as torch has them: the function, if it was recorded, or else the file that
    registered it.
    """
    present = internals.python_kernels.get()
    baseline = _s3cache_autoload.baseline.get(_s3cache_autoload.KERNELS, {})
    new = present - baseline.keys() if _recorded.is_complete else set(present)
    seen = present & _recorded.kernels.keys()
    state = _recorded.count, seen, new
    if _recorded.last is None or _recorded.last[0] != state:
        _recorded.last = state, dict(_find_replaced(seen, new))
    return _recorded.last[1]


def _find_replaced(seen: set[str], new: set[str]) -> Iterator[tuple[str, object]]:
    for where in sorted(seen | new):
        name, _, key = where.rpartition("/")
        name = name.replace("/", "::", 1)
        if where in seen and not _is_kernel_of_torch(_recorded.kernels[where]):
            found = _recorded.kernels[where]
        elif where in new:
            found = _path_of_others(name, key)
        else:
            continue
        if found and is_of_torch(name):
            yield where, found


def _is_kernel_of_torch(function: object) -> bool:
    if id(function) in _known:
        return True
    if any(map(is_foreign, (function, *_formulas_in(function, 0)))):
        return False
    _known[id(function)] = function
    return True


def _formulas_in(value: object, depth: int) -> Iterator[object]:
    """Yield functions that torch keeps for a backward formula: in a class, which has an object."""
    if depth > _MAX_DEPTH or internals.is_operator(value):
        return
    if isinstance(value, FunctionType):
        inner = [content_of(cell) for cell in value.__closure__ or ()]
    elif isinstance(value, type):
        inner = [each.__func__ for each in vars(value).values() if isinstance(each, staticmethod)]
    else:
        kinds = FunctionType, MethodType, partial
        inner = [
            each for each in getattr(value, "__dict__", {}).values() if isinstance(each, kinds)
        ]
        yield from inner
    for each in inner:
        yield from _formulas_in(each, depth + 1)


def foreign_fakes() -> Iterator[tuple[str, object]]:
    """Yield the functions that others registered to be called in place of torch's during tracing.

    With each comes the operator, and what it is for.
    """
    for place, name, function in _fakes():
        if id(function) in _known:
            continue
        if not is_foreign(function):
            _known[id(function)] = function
        elif is_of_torch(name):
            yield f"{name} {place}", function


def _fakes() -> Iterator[tuple[str, str, object]]:
    for name, kept in list(internals.fake_registry.get().items()):
        kernel = kept.fake_impl.kernel
        if kernel is not None:
            yield "on fake tensors", name, kernel.func
        for rule in kept.torch_dispatch_rules._data.values():
            yield "on a class of tensors", name, rule
    for name, definition in list(internals.custom_operators.get().items()):
        for function in (
            definition._abstract_fn,
            definition._backward_fn,
            definition._setup_context_fn,
            definition._vmap_fn,
            *definition._torch_dispatch_fns.values(),
        ):
            if function is not None:
                yield "on tracing", name, function


def _path_of_others(name: str, key: str) -> str:
    """Return the file that registers a kernel, or "" if torch does."""
    paths = [path for each, path in _registered_at(name) if each == key]
    if not paths:  # it was registered since
        _registered_at.cache_clear()
        paths = [path for each, path in _registered_at(name) if each == key]
    home = internals.torch_directory()
    for_others = _files_that_register_for_others() if name.startswith("aten::") else ()
    found = (path for path in paths if path.startswith(for_others) or not path.startswith(home))
    return next(found, "")


@functools.cache
def _registered_at(name: str) -> list[tuple[str, str]]:
    """Return the keys of kernels in Python, each with the file that registered it."""
    return [
        (key.partition("[")[0], path)
        for key, path in internals.REGISTERED_AT.findall(internals.dispatch_dump.get()(name))
        if not path.endswith(_NATIVE)
    ]
