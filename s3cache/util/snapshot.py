"""Remember which objects are in many places, and say later which places hold others.

Objects are compared by identity, never with ``==``. This file does not know torch, and imports only
what torch has imported: with ``S3CACHE_URL`` set, ``import torch`` loads it.
"""

from __future__ import annotations

import dis
import gc
import os
import threading
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain, compress
from operator import attrgetter, is_, is_not, ne
from typing import Any, Generic, TypeAlias, TypeVar

#: Stands for what is not there.
ABSENT = object()

_T = TypeVar("_T")

_HOLDERS = (staticmethod, classmethod, types.MethodType)
_KINDS = frozenset((types.FunctionType, property, *_HOLDERS))  # functions, and what holds some
_Attribute: TypeAlias = "attrgetter[Any]"
_code, _defaults, _keywords, _content = map(
    attrgetter, ("__code__", "__defaults__", "__kwdefaults__", "cell_contents")
)


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
    """Containers as they were at the last look.

    ``get_version_of`` returns a function that numbers the states of a dictionary: while the number
    stays the same, the dictionary holds the very same objects.
    """

    def __init__(self, get_version_of: Callable[[], Callable[[dict[Any, Any]], int]]) -> None:
        self._get_version_of = get_version_of
        self._dicts: list[dict[Any, Any]] = []
        self._versions: list[int] = []
        self._owners: list[_T] = []  # of the dictionaries
        self._others: list[tuple[Collection[object], list[object], _T]] = []  # with their content

    def add(self, owner: _T, *containers: Collection[object]) -> None:
        """Watch more containers; ``owner`` is what :meth:`changed` returns for them."""
        version_of = self._get_version_of()
        for each in containers:
            if isinstance(each, types.MappingProxyType):  # that of a class
                (each,) = gc.get_referents(each)
            if isinstance(each, dict):
                self._dicts.append(each)
                self._versions.append(version_of(each))
                self._owners.append(owner)
            else:
                self._others.append((each, list(each), owner))

    def changed(self) -> list[_T]:
        """Return the owners of the containers that were written to since the last call.

        A container may hold what it held before: writing the old value back counts as well.
        """
        versions = list(map(self._get_version_of(), self._dicts))
        found = [*compress(self._owners, map(ne, versions, self._versions))]
        self._versions = versions
        for number, (container, content, owner) in enumerate(self._others):
            if not are_identical(container, content):
                self._others[number] = container, list(container), owner
                found.append(owner)
        return list({id(each): each for each in found}.values())


class Functions:
    """The code, defaults and closures of functions, and of those that they wrap."""

    def __init__(self) -> None:
        self._seen: set[int] = set()  # of functions and cells, which are kept
        # By attribute: what has it, its value, and the function that it is of. Of defaults only
        # those that there are: to give some to another function changes no call that worked.
        self._noted: dict[_Attribute, tuple[list[Any], list[Any], list[types.FunctionType]]] = {
            attribute: ([], [], []) for attribute in (_code, _defaults, _keywords, _content)
        }
        self._in_keywords: list[tuple[object, ...]] = []  # names and values, as those may change
        self._rebound: dict[int, bool] = {}  # cells that a function with them assigns to, by id
        self.lock = threading.RLock()  # any thread may import a module

    def add(self, values: Iterable[object]) -> None:
        """Take those of ``values`` that are functions, or hold some, as they are now."""
        waiting: list[Any] = [each for each in list(values) if type(each) in _KINDS]
        seen = self._seen
        with self.lock:
            while waiting:
                value = waiting.pop()
                kind = type(value)
                if kind is types.FunctionType:
                    if id(value) not in seen:
                        self._add(value, waiting)
                elif kind in _HOLDERS:
                    waiting.append(value.__func__)
                elif kind is property:
                    waiting += (value.fget, value.fset, value.fdel)

    def _add(self, function: types.FunctionType, waiting: list[Any]) -> None:
        self._seen.add(id(function))
        self._note(_code, function, function.__code__, function)
        if function.__code__.co_filename.startswith("<"):
            return  # such as Python makes for data classes
        if function.__defaults__:
            self._note(_defaults, function, function.__defaults__, function)
        if function.__kwdefaults__:
            self._note(_keywords, function, function.__kwdefaults__, function)
            self._in_keywords.append(_inside(function))
        for cell in function.__closure__ or ():
            content = content_of(cell)
            if id(cell) not in self._seen and content is not ABSENT:
                self._seen.add(id(cell))
                self._note(_content, cell, content, function)
                waiting.append(content)

    def _note(
        self, attribute: _Attribute, owner: object, value: object, function: types.FunctionType
    ) -> None:
        owners, values, functions = self._noted[attribute]
        owners.append(owner)
        values.append(value)
        functions.append(function)

    def changed(self) -> list[types.FunctionType]:
        """Return functions that are not as they were added.

        A variable of a closure may hold something else if such a function assigns to it.
        """
        with self.lock:
            return list(self._find_changed())

    def _find_changed(self) -> Iterator[types.FunctionType]:
        for function, _, _ in self._differing(_code):
            yield function
        for function, defaults, _ in self._differing(_defaults):
            if not are_identical(function.__defaults__ or (), defaults):
                yield function
        yield from self._with_other_keywords()
        for cell, _, function in self._differing(_content):
            if not self._is_rebound(cell, function):
                yield function

    def _differing(self, attribute: _Attribute) -> Iterator[tuple[Any, Any, types.FunctionType]]:
        # Thousands are asked, which costs half as much without a line of Python for each.
        owners, values, functions = self._noted[attribute]
        numbers = range(len(owners))
        try:
            found = [*compress(numbers, map(is_not, map(attribute, owners), values))]
        except ValueError:  # a cell was emptied
            found = [*compress(numbers, map(is_not, map(content_of, owners), values))]
        for number in found:
            yield owners[number], values[number], functions[number]

    def _with_other_keywords(self) -> Iterator[types.FunctionType]:
        functions, noted, _ = self._noted[_keywords]
        items = chain.from_iterable(chain.from_iterable(map(dict.items, noted)))
        is_same = are_identical([*items], [*chain.from_iterable(self._in_keywords)])
        if is_same and not [*self._differing(_keywords)]:
            return
        for function, inside in zip(functions, self._in_keywords, strict=True):
            if not are_identical(_inside(function), inside):
                yield function

    def _is_rebound(self, cell: types.CellType, function: types.FunctionType) -> bool:
        """Return True if a function that has the variable assigns to it, as its own state."""
        if id(cell) not in self._rebound:
            # `function` is one that has it: to find the others takes a tenth of a second.
            self._rebound[id(cell)] = any(
                each is cell and assigns(holder.__code__, name)
                for holder in chain((function,), _functions_with(cell))
                for name, each in zip(
                    holder.__code__.co_freevars, holder.__closure__ or (), strict=False
                )
            )
        return self._rebound[id(cell)]


def _functions_with(cell: types.CellType) -> Iterator[types.FunctionType]:
    for closure in gc.get_referrers(cell):
        for function in gc.get_referrers(closure) if type(closure) is tuple else ():
            if isinstance(function, types.FunctionType) and function.__closure__ is closure:
                yield function


def assigns(code: types.CodeType, name: str) -> bool:
    """Return True if code binds a global, an attribute or a variable of a closure of that name."""
    names = *code.co_names, *code.co_freevars, *code.co_cellvars
    # Most code with the name only reads it: what disassembling costs is spared it.
    if (name in names and not _BINDING.isdisjoint(code.co_code[::2])) and any(
        each.argval == name and each.opcode in _BINDING for each in dis.get_instructions(code)
    ):
        return True
    if name in code.co_consts and not {"setattr", "globals"}.isdisjoint(code.co_names):
        return True
    return any(assigns(each, name) for each in code.co_consts if type(each) is types.CodeType)


_BINDING = frozenset(
    dis.opmap[f"{verb}_{kind}"]
    for verb in ("STORE", "DELETE")
    for kind in ("GLOBAL", "ATTR", "DEREF")
)


def _inside(function: types.FunctionType) -> tuple[object, ...]:
    return tuple(chain.from_iterable((function.__kwdefaults__ or {}).items()))


#: Functions of torch's, noted as early as the process could.
FUNCTIONS = Functions()
os.register_at_fork(  # so that a child has it free, and the lists whole
    before=FUNCTIONS.lock.acquire,
    after_in_parent=FUNCTIONS.lock.release,
    after_in_child=FUNCTIONS.lock.release,
)
