"""Snapshots: remember the objects in many places, and find the places with other objects later.

Objects are compared by identity, never with ``==``. This file does not depend on torch, and imports
only modules that torch has imported: with ``S3CACHE_URL`` set, ``import torch`` loads it.
"""

from __future__ import annotations

import contextlib
import dis
import gc
import os
import threading
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain, compress
from operator import attrgetter, is_, is_not, ne
from typing import Any, Generic, TypeAlias, TypeVar

#: The marker for a missing object.
ABSENT = object()

_T = TypeVar("_T")

_HOLDERS = (staticmethod, classmethod, types.MethodType)
_KINDS = frozenset((types.FunctionType, property, *_HOLDERS))  # functions, and their wrappers
_Attribute: TypeAlias = "attrgetter[Any]"
_code, _defaults, _keywords, _content = map(
    attrgetter, ("__code__", "__defaults__", "__kwdefaults__", "cell_contents")
)


def are_identical(some: Collection[object], others: Collection[object]) -> bool:
    """Return True if both have the same objects in the same order, by identity."""
    return len(some) == len(others) and all(map(is_, some, others))


def content_of(cell: types.CellType) -> object:
    """Return the value of a closure variable, :data:`ABSENT` if it is unbound."""
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


class Snapshot(Generic[_T]):
    """The content of containers at the last look.

    ``get_version_of`` returns a function that numbers the states of a dictionary: while the number
    is unchanged, the dictionary has the same objects.
    """

    def __init__(self, get_version_of: Callable[[], Callable[[dict[Any, Any]], int]]) -> None:
        self._get_version_of = get_version_of
        self._dicts: list[dict[Any, Any]] = []
        self._versions: list[int] = []
        self._owners: list[_T] = []  # of the dictionaries
        self._others: list[tuple[Collection[object], list[object], _T]] = []  # with their content

    def add(self, owner: _T, *containers: Collection[object]) -> None:
        """Watch more containers; :meth:`changed` returns ``owner`` for them."""
        version_of = self._get_version_of()
        for container in containers:
            if isinstance(container, types.MappingProxyType):  # of a class
                (container,) = gc.get_referents(container)
            if isinstance(container, dict):
                self._dicts.append(container)
                self._versions.append(version_of(container))
                self._owners.append(owner)
            else:
                self._others.append((container, list(container), owner))

    def changed(self) -> list[_T]:
        """Return the owners of the containers that were written to since the last call.

        The content may be unchanged: writing the old value back counts too.
        """
        versions = list(map(self._get_version_of(), self._dicts))
        owners = [*compress(self._owners, map(ne, versions, self._versions))]
        self._versions = versions
        for number, (container, content, owner) in enumerate(self._others):
            if not are_identical(container, content):
                self._others[number] = container, list(container), owner
                owners.append(owner)
        return list({id(owner): owner for owner in owners}.values())


class Functions:
    """The code, defaults and closures of functions, and of functions that they wrap."""

    def __init__(self) -> None:
        self._seen: set[int] = set()  # ids of functions and cells, which are kept alive
        # By attribute: the owners, the values, and their functions. Only existing defaults are
        # recorded: adding defaults to another function does not change calls that worked.
        self._noted: dict[_Attribute, tuple[list[Any], list[Any], list[Any]]] = {
            attribute: ([], [], []) for attribute in (_code, _defaults, _keywords, _content)
        }
        self._in_keywords: list[tuple[object, ...]] = []  # copies of names and values
        self._rebound: dict[int, bool] = {}  # whether a function assigns to a cell, by id
        self.lock = threading.RLock()  # any thread may import a module

    def add(self, values: Iterable[object]) -> None:
        """Record the functions among ``values``, and functions inside of them."""
        waiting: list[Any] = [value for value in list(values) if type(value) in _KINDS]
        with self.lock:
            while waiting:
                value = waiting.pop()
                kind = type(value)
                if kind is types.FunctionType:
                    if id(value) not in self._seen:
                        self._add(value, waiting)
                elif kind in _HOLDERS:
                    waiting.append(value.__func__)
                elif kind is property:
                    waiting += (value.fget, value.fset, value.fdel)

    def _add(self, function: types.FunctionType, waiting: list[Any]) -> None:
        self._seen.add(id(function))
        self._note(_code, function, function)
        if function.__code__.co_filename.startswith("<"):
            return  # generated by Python for data classes
        if function.__defaults__:
            self._note(_defaults, function, function)
        if function.__kwdefaults__:
            self._note(_keywords, function, function)
            self._in_keywords.append(_inside(function))
        for cell in function.__closure__ or ():
            content = content_of(cell)
            if id(cell) not in self._seen and content is not ABSENT:
                self._seen.add(id(cell))
                self._note(_content, cell, function)
                waiting.append(content)

    def _note(self, attribute: _Attribute, owner: object, function: types.FunctionType) -> None:
        owners, values, functions = self._noted[attribute]  # there are thousands: no loop
        owners.append(owner)
        values.append(attribute(owner))
        functions.append(function)

    def changed(self) -> list[types.FunctionType]:
        """Return functions that changed since they were added.

        A closure variable may change if one of its functions assigns to it.
        """
        with self.lock:
            functions = [function for function, _, _ in self._differing(_code)]
            for function, defaults, _ in self._differing(_defaults):
                if not are_identical(function.__defaults__ or (), defaults):
                    functions.append(function)
            functions += self._with_other_keywords()
            for cell, _, function in self._differing(_content):
                if not self._is_rebound(cell, function):
                    functions.append(function)
            return functions

    def _differing(self, attribute: _Attribute) -> Iterator[tuple[Any, Any, types.FunctionType]]:
        # There are thousands: without a line of Python for each, this takes half the time.
        owners, values, functions = self._noted[attribute]
        numbers = range(len(owners))
        try:
            changed = [*compress(numbers, map(is_not, map(attribute, owners), values))]
        except ValueError:  # a cell was emptied
            changed = [*compress(numbers, map(is_not, map(content_of, owners), values))]
        for number in changed:
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
        """Return True if one of the variable's functions assigns to it, as its own state."""
        if id(cell) not in self._rebound:
            # Try `function` first: finding the others takes a tenth of a second.
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
    """Return True if code assigns to a global, an attribute or a closure variable ``name``."""
    names = *code.co_names, *code.co_freevars, *code.co_cellvars
    # Most code with the name only reads it: avoid disassembling it.
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


class Calls:
    """Which of some functions run while torch compiles.

    A compile that calls none of them does not depend on them. During compiles they have other code,
    which records the call. torch remembers results from one compile to the next. So a function is
    watched only if it is in its place before the first compile, and one call counts for all later
    compiles of the process.
    """

    def __init__(self) -> None:
        self.called = ""  # the name of the first function that ran; not empty if that is unknown
        self._is_new = False  # whether the process has not compiled anything
        self._compiling = 0
        # The functions, with their own code and the code that records.
        self._watched: list[tuple[types.FunctionType, types.CodeType, types.CodeType]] = []
        self._lock = threading.RLock()

    @property
    def is_watching(self) -> bool:
        return bool(self._watched)

    def begin(self) -> None:
        """Begin in a process that has not compiled anything."""
        with self._lock:
            if not self._compiling:
                self._is_new, self.called = True, ""
                self._watched.clear()

    def end(self) -> None:
        """End: compiles are not observed from now on."""
        self._is_new = False
        if self._watched:
            self.called = self.called or "another function"

    def why_used(self, value: object) -> str:
        """Return why compiles may depend on ``value``; "" if it is watched, and did not run."""
        functions = _functions_of(value)
        with self._lock:
            if not functions or not self._compiling:
                return "may take part in tracing every graph"
            watched = {id(each) for each, _, _ in self._watched}
            new = [each for each in functions if id(each) not in watched]
            if new and not (self._is_new and self._compiling == 1):
                return "may have changed what torch remembers of earlier compiles"
            for function in () if self.called else new:
                code = _recording(function, len(self._watched))
                self._watched.append((function, function.__code__, code))
            self._exchange()
            return f"ran during a compile, or {self.called} did" if self.called else ""

    def check_present(self, values: Iterable[object]) -> None:
        """Record that torch's own functions may run again, if a watched one is not among values."""
        if self._watched and not self.called:
            present = {id(each) for value in values for each in _functions_of(value)}
            if any(id(function) not in present for function, _, _ in self._watched):
                self.called = "another function"

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Record calls in the block, by any thread."""
        with self._lock:
            self._compiling += 1
            self._exchange()
        try:
            yield
        finally:
            with self._lock:
                self._compiling -= 1
                self._is_new = False
                self._exchange()

    def _exchange(self) -> None:
        is_recording = self._compiling and not self.called
        for function, own, recording in self._watched:
            if function.__code__ is not own and function.__code__ is not recording:
                self.called = self.called or function.__qualname__
            else:
                function.__code__ = recording if is_recording else own

    def original(self, number: int) -> types.FunctionType:
        """Record that a function runs, and return it with its own code."""
        function, code, _ = self._watched[number]
        self.called = self.called or f"{function.__module__}.{function.__qualname__}"
        names, name = function.__globals__, function.__name__
        copy = types.FunctionType(code, names, name, function.__defaults__, function.__closure__)
        copy.__kwdefaults__ = function.__kwdefaults__
        return copy

    def own_code(self, function: types.FunctionType) -> types.CodeType:
        """Return the code that a function has outside of compiles."""
        return next((own for each, own, _ in self._watched if each is function), function.__code__)


# Code of a function must have as many closure variables as the function.
_RECORDING = """
def make({free}):
    def recording(*args, **kwargs):
        lambda: ({free})
        from s3cache.util import snapshot
        return snapshot.CALLS.original({number})(*args, **kwargs)
    return recording.__code__
"""


def _recording(function: types.FunctionType, number: int) -> types.CodeType:
    names, old = dict[str, Any](), function.__code__
    free = "".join(f"v{each}, " for each in range(len(old.co_freevars)))
    exec(_RECORDING.format(free=free, number=number), names)  # noqa: S102 - ours
    code: types.CodeType = names["make"](*old.co_freevars)
    same = {name: getattr(old, name) for name in ("co_filename", "co_name", "co_firstlineno")}
    return code.replace(**same)


def _functions_of(value: object) -> list[types.FunctionType]:
    """Return the functions that run if ``value`` is used; none if it may be used without them."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if type(value) is types.FunctionType:
        return [value]
    if type(value) is not type or value.__bases__ != (object,):
        return []
    functions = {n: each for n, each in vars(value).items() if type(each) is types.FunctionType}
    others = vars(value).keys() - functions
    is_observed = "__init__" in functions and all(name.startswith("__") for name in others)
    return [*functions.values()] if is_observed else []


#: torch's functions, recorded as early as possible.
FUNCTIONS = Functions()
#: Functions that replaced some of torch's.
CALLS = Calls()
os.register_at_fork(  # so that the lock is free in a child, and the lists are consistent
    before=FUNCTIONS.lock.acquire,
    after_in_parent=FUNCTIONS.lock.release,
    after_in_child=FUNCTIONS.lock.release,
)
