"""Numbers, texts and tables in torch's modules that make code, where others have changed them.

``cpp_gemm_template.GEMM_TEMPLATE = mine`` and ``DTYPE_TO_CPP[torch.half] = "float"`` change what is
made of a graph as well as a function does. torch itself changes many of them as it works: counters,
caches, what it has found out. Those are told apart by what its own code does to them.
"""

from __future__ import annotations

import functools
import itertools
import opcode
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from operator import is_
from typing import NamedTuple

from s3cache.graph._whose import ABSENT, is_foreign, shown
from s3cache.torch_api import internals

__all__ = ["ChangedPart", "Tables", "is_changed_value"]

_SCALARS: tuple[type, ...] = (str, bytes, int, bool, float, complex, type(None))
_TABLES: tuple[type, ...] = (dict, list, set)
_FIXED: tuple[type, ...] = (tuple, frozenset)
_MAX_DEPTH = 3


@functools.cache
def _kinds_of_tables() -> frozenset[type]:
    kinds: tuple[type, ...] = (*_TABLES, internals.ordered_set.get())
    return frozenset(kinds)


@functools.cache
def _kinds_of_values() -> frozenset[type]:
    return frozenset((*_SCALARS, *_FIXED)) | _kinds_of_tables()


# -- what stands under a name


def is_changed_value(place: str, module: str, name: str, had: object, value: object) -> bool:
    """Whether somebody else than torch has put another value there.

    Args:
        place: the module, or a class in it; what is new in a class may hide what its bases have.
    """
    if name.startswith("__") or _kinds_of_values().isdisjoint((type(had), type(value))):
        return False
    if had is ABSENT and place == module:
        return False
    return not _are_alike(had, value, 0) and not _is_assigned(place, module, name)


def _are_alike(had: object, value: object, depth: int) -> bool:
    """By what they are, and not by what they say that they equal; 1 is not True."""
    if had is value:
        return True
    kind = type(had)
    if kind is not type(value) or kind not in _kinds_of_values() or depth > _MAX_DEPTH:
        return False
    if isinstance(had, _SCALARS):
        return had == value
    old, new = (_parts(each) for each in (had, value))  # type: ignore[arg-type]
    return len(old) == len(new) and all(
        _are_alike(one, other, depth + 1) for one, other in zip(old, new, strict=True)
    )


def _parts(value: Collection[object]) -> list[object]:
    return [*value, *value.values()] if isinstance(value, dict) else list(value)


@functools.cache
def _is_assigned(place: str, module: str, name: str) -> bool:
    """Whether a function of torch's assigns to what is called so: then it is torch's own state."""
    owner = sys.modules.get(module)
    members = {} if owner is None else dict(vars(owner))
    inner = members.get(place.removeprefix(f"{module}."))
    near = dict(vars(inner)) if isinstance(inner, type) else {}  # most often it is done there
    return any(
        internals.has_code_of_torch(each) and _assigns(each.__code__, name)
        for each in _functions({**near, **members}, module)
    )


def _functions(members: Mapping[str, object], module: str) -> Iterator[types.FunctionType]:
    """Those in a module, in its classes, and what they wrap."""
    classes: list[type] = []
    for value in members.values():
        if type(value) is types.FunctionType and value.__closure__ is None:
            yield value  # most of them
        elif isinstance(value, type):
            classes.append(value)
        else:
            yield from _inner_functions(value, 0)
    for each in classes:
        if each.__module__ == module:
            yield from _functions(dict(vars(each)), "")


def _inner_functions(value: object, depth: int) -> Iterator[types.FunctionType]:
    if type(value) is types.FunctionType:
        yield value
    if depth < _MAX_DEPTH:
        for inner in _wrapped(value):
            yield from _inner_functions(inner, depth + 1)


def _wrapped(value: object) -> Iterator[object]:
    """What is inside of a function, or of what holds one."""
    if type(value) is types.FunctionType:
        for cell in value.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:
                continue
            yield content
    elif isinstance(value, property):
        yield from (value.fget, value.fset)
    elif isinstance(value, (staticmethod, classmethod, types.MethodType)):
        yield value.__func__
    elif isinstance(value, functools._lru_cache_wrapper):
        yield value.__wrapped__


_STORES = frozenset(
    opcode.opmap[name] for name in ("STORE_GLOBAL", "STORE_ATTR", "DELETE_GLOBAL", "DELETE_ATTR")
)


def _assigns(code: types.CodeType, name: str) -> bool:
    if name in code.co_names:
        # Of a name beyond the 255th only the low byte is here: then another may be taken for it.
        low = code.co_names.index(name) & 255
        if any(_has_word(code.co_code, bytes((store, low))) for store in _STORES):
            return True
    if name in code.co_consts and not {"setattr", "globals"}.isdisjoint(code.co_names):
        return True
    return any(_assigns(each, name) for each in code.co_consts if type(each) is types.CodeType)


def _has_word(words: bytes, word: bytes) -> bool:
    at = words.find(word)
    while at % 2 == 1 and at > 0:
        at = words.find(word, at + 1)
    return at >= 0


# -- what is in tables


class ChangedPart(NamedTuple):
    """What is in a table under a key, or at a place of a list; :data:`ABSENT` if it is gone."""

    place: str
    value: object


class _Noted(NamedTuple):
    place: str
    table: Collection[object]
    keys: tuple[object, ...]
    values: tuple[object, ...]  # the same as the keys, but of a dictionary


class Tables:
    """Dictionaries, lists and sets with something in them, as they were when they were first seen.

    But for those with objects in them of other kinds than constants are made of, which are caches
    and registries.
    """

    def __init__(self) -> None:
        self._noted: list[_Noted] = []
        self._seen: set[int] = set()  # by id: all are kept
        # All that was in them at the last look, and what of that was told.
        self._views: list[Collection[object]] = []
        self._sizes: list[int] = []
        self._flat: list[object] = []
        self._changed: list[ChangedPart] = []

    def leave_out(self, tables: Iterable[object]) -> None:
        """Of these somebody else knows more."""
        self._seen.update(map(id, tables))

    def note(self, place: str, members: Mapping[str, object]) -> None:
        """What is in those of ``members`` now is torch's."""
        for name, value in members.items():
            if type(value) in _kinds_of_tables() and not name.startswith("__"):
                self._note(f"{place}.{name}", value, 0)  # type: ignore[arg-type]

    def _note(self, place: str, table: Collection[object], depth: int) -> None:
        if not table or id(table) in self._seen or depth > _MAX_DEPTH:
            return
        views = _views(table)
        keys, values = tuple(views[0]), tuple(views[-1])
        if not all(map(_is_constant, (*keys, *values))):
            return
        self._seen.add(id(table))
        self._noted.append(_Noted(place, table, keys, values))
        for view in views:
            self._views.append(view)
            self._sizes.append(len(view))
            self._flat += view
        names = keys if isinstance(table, dict) else range(len(values))
        for name, value in zip(names, values, strict=True):
            if type(value) in _kinds_of_tables():
                self._note(f"{place}[{shown(name)}]", value, depth + 1)  # type: ignore[arg-type]

    def changed(self) -> list[ChangedPart]:
        """What is not as it was."""
        if not self._is_as_before():
            now = [list(view) for view in self._views]
            self._changed = list(itertools.chain.from_iterable(map(_changes, self._noted)))
            self._sizes = list(map(len, now))
            self._flat = list(itertools.chain.from_iterable(now))
        return self._changed

    def _is_as_before(self) -> bool:
        try:
            return list(map(len, self._views)) == self._sizes and all(
                map(is_, itertools.chain.from_iterable(self._views), self._flat)
            )
        except RuntimeError:  # another thread has changed one meanwhile
            return False


def _views(table: Collection[object]) -> list[Collection[object]]:
    """What is in it; of a dictionary its keys and its values."""
    if isinstance(table, dict):
        return [table, table.values()]
    if type(table) is internals.ordered_set.get():
        return [internals.inside_of_ordered_set(table)]  # it would run a line of Python for each
    return [table]


def _is_constant(value: object) -> bool:
    kind = type(value)
    if kind in _kinds_of_values() or internals.is_dtype(value) or internals.is_operator(value):
        return True
    return isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType))


def _changes(noted: _Noted) -> Iterator[ChangedPart]:
    views = _views(noted.table)
    keys, values = list(views[0]), list(views[-1])
    if internals.are_identical(keys, noted.keys) and internals.are_identical(values, noted.values):
        return
    if isinstance(noted.table, list):
        longest = itertools.zip_longest(noted.values, values, fillvalue=ABSENT)
        pairs: Iterable[tuple[object, object, object]] = (
            (number, had, value) for number, (had, value) in enumerate(longest)
        )
    else:
        old = dict(zip(noted.keys, noted.values, strict=True))
        now = dict(zip(keys, values, strict=False))
        pairs = ((key, old.get(key, ABSENT), now.get(key, ABSENT)) for key in {**old, **now})
        there = [key for key in keys if key in old]
        if not isinstance(noted.table, set) and there != [key for key in old if key in now]:
            yield ChangedPart(f"the order of {noted.place}", there)
    for key, had, value in pairs:
        if not _are_alike(had, value, 0) and _is_told(noted, key, had, value):
            yield ChangedPart(f"{noted.place}[{shown(key)}]", value)


def _is_told(noted: _Noted, key: object, had: object, value: object) -> bool:
    """Whether it is not torch that did it."""
    if type(had) is int and type(value) is int and isinstance(noted.table, list):
        return False  # so Python counts in what cannot be assigned to
    if had is not ABSENT:
        return True
    # torch registers its own operators and functions in them as it goes, and no new numbers.
    plain = all(map(_is_plain, (*noted.keys, *noted.values, key, value)))
    return plain or (callable(value) and is_foreign(value, ""))


def _is_plain(value: object) -> bool:
    return isinstance(value, _SCALARS) or internals.is_dtype(value)
