"""A digest of what a Python function does: of its code, and of what that code refers to.

Two functions with equal digests behave alike, as far as can be seen without running them. File
names, line numbers and names of local variables do not matter; constants, defaults, closures and
the functions and values that are referred to by name do.

Some things cannot be seen: what C code does, what it reads from the process or the machine. Where a
digest is to be the only evidence, :func:`told` refuses a function that comes by such a thing.
"""

from __future__ import annotations

import dis
import enum
import functools
import hashlib
import logging
import os
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

from s3cache.torch_api import internals

if TYPE_CHECKING:
    from torch import Tensor

    from s3cache.torch_api.protocols import Function

__all__ = ["UntoldError", "code_fingerprint", "fingerprint", "told"]

_MAX_DEPTH = 12
_MAX_VALUES = 20_000
_MAX_ELEMENTS = 4096
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...))
_NATIVE = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
)
# Modules of Python's library that compute, and read nothing but what they are given: the version
# in the key says what they are. What is said to a log changes nothing.
_PURE = """
    __future__ _collections _collections_abc _functools _operator abc bisect builtins cmath
    collections contextlib copy dataclasses enum functools heapq inspect itertools logging math
    numbers operator re string textwrap types typing typing_extensions warnings
"""
# What Inductor itself computes with. Its objects keep their hash(), and numbers drawn at random.
_OF_INDUCTOR = ("sympy", "mpmath")
# What differs between processes that are alike, by the names under which it is asked for.
_ASKS_PROCESS = """
    current_device device_count get_coordinate get_device_capability get_device_name
    get_device_properties get_global_rank get_group_rank get_local_rank get_node_local_rank get_rank
    get_world_size initial_seed max_memory_allocated mem_get_info memory_allocated memory_reserved
    memory_stats rand rand_like randint randn randn_like randperm
"""
_ASKS_ANYTHING = "__import__ breakpoint compile eval exec globals input locals open vars"
# Members of a class that say nothing about what it does.
_ABOUT_CLASSES = """
    __abstractmethods__ __annotations__ __dict__ __doc__ __firstlineno__ __module__
    __static_attributes__ __weakref__
"""


_pure, _asks_process, _asks_anything, _about_classes = (
    frozenset(names.split()) for names in (_PURE, _ASKS_PROCESS, _ASKS_ANYTHING, _ABOUT_CLASSES)
)


class UntoldError(Exception):
    """It cannot be told what a function does."""


def fingerprint(function: Function[object]) -> str:
    """32 hexadecimal digits, the same in every process with the same Python and torch."""
    walk = _Walk()
    walk.value(function, 0)
    return walk.digest()


def told(function: object) -> str:
    """The fingerprint of a function all of which is seen, so that it is evidence by itself.

    Raises:
        UntoldError: it comes by native code, or asks the process or the machine; says for what.
    """
    walk = _Walk()
    walk.value(function, 0)
    if walk.untold:
        raise UntoldError(walk.untold)
    return walk.digest()


def code_fingerprint(code: types.CodeType) -> str:
    """The same of compiled Python code by itself, its names and those of its variables."""
    walk = _Walk()
    walk.code(code)
    return walk.digest()


class _Walk:
    """One walk through what a function refers to.

    Attributes:
        untold: the first thing met of which it cannot be told what it does; empty if there is none.
    """

    def __init__(self) -> None:
        self.untold = ""
        self._hash = hashlib.sha256()
        self._order: dict[int, int] = {}
        self._kept: list[object] = []  # an id is only good while its object lives
        self._left = _MAX_VALUES

    def digest(self) -> str:
        return self._hash.hexdigest()[:32]

    def _say(self, *words: object) -> None:
        for word in words:
            text = str(word).encode()
            self._hash.update(f"{len(text)}:".encode() + text)

    def _miss(self, what: str) -> None:
        self.untold = self.untold or what

    def code(self, code: types.CodeType) -> None:
        self._say(code.co_name, *code.co_varnames, *code.co_freevars, "code")
        self._code(code, 0)

    def value(self, value: object, depth: int) -> None:
        if isinstance(value, _PLAIN):
            self._say(type(value).__name__, repr(value))
        elif id(value) in self._order:
            self._say("again", self._order[id(value)])
        elif depth > _MAX_DEPTH or not self._left:
            self._say("deep", _name(value))
            self._miss(f"refers to too much, or over too many others: {_name(value)}")
        else:
            self._left -= 1
            self._order[id(value)] = len(self._order)
            self._kept.append(value)
            self._new(value, depth)

    def _new(self, value: object, depth: int) -> None:
        from torch import Tensor

        if (library := _library(value)) is not None:
            self._say("library", library, _name(value))
        elif (library := _library(type(value))) is not None:
            self._say("object", library, _name(type(value)), repr(value))
            self._miss(f"refers to a {_name(type(value))}")
        elif isinstance(value, (list, tuple, set, frozenset, dict)):
            self._container(value, depth)
        elif isinstance(value, partial):
            self._items("partial", (value.func, value.args, value.keywords), depth)
        elif isinstance(value, types.MethodType):
            self._items("method", (value.__func__, value.__self__), depth)
        elif isinstance(value, types.FunctionType):
            self._function(value, depth)
        elif isinstance(value, types.ModuleType):
            self._say("module", value.__name__, getattr(value, "__version__", ""))
            if not _is_covered(value):
                self._miss(f"refers to the module {value.__name__} as a whole")
        elif internals.is_operator(value):
            self._say("operator", value)
        elif isinstance(value, Tensor):
            self._tensor(value)
        elif isinstance(value, _NATIVE):
            self._native(value, depth)
        elif isinstance(value, type):
            self._class(value, depth)
        elif isinstance(value, (enum.Enum, re.Pattern, logging.Logger)):
            self._say("named", _name(value), repr(value))
        elif isinstance(value, (staticmethod, classmethod)):
            self.value(value.__func__, depth)
        elif isinstance(value, property):
            self._items("property", (value.fget, value.fset), depth)
        elif isinstance(value, functools._lru_cache_wrapper):
            self.value(value.__wrapped__, depth)
        elif _is_torchs(value) and not callable(value) and " at 0x" not in repr(value):
            self._say("named", _name(value), repr(value))
        else:
            self._object(value, depth)

    def _container(self, value: object, depth: int) -> None:
        kind = type(value)
        if kind.__module__ != "builtins":
            self.value(kind, depth + 1)
            self.value(getattr(value, "default_factory", None), depth + 1)
        if isinstance(value, (list, tuple)):
            self._items(kind.__name__, value, depth)
        elif isinstance(value, (set, frozenset)):
            self._say(kind.__name__, *sorted(self._alone(each, depth) for each in value))
        elif isinstance(value, dict) and all(isinstance(name, str) for name in value):
            self._say(kind.__name__, *sorted(value))
            self._items("values", (value[name] for name in sorted(value)), depth)
        elif isinstance(value, dict):
            self._say(kind.__name__, *sorted(self._alone(item, depth) for item in value.items()))

    def _items(self, kind: str, values: Iterable[object], depth: int) -> None:
        self._say(kind)
        for item in values:
            self.value(item, depth + 1)
        self._say("end")

    def _alone(self, value: object, depth: int) -> str:
        """A digest of something that has no place among its like."""
        walk = _Walk()
        walk._left = self._left
        walk.value(value, depth + 1)
        self._left = walk._left
        self._miss(walk.untold)
        return walk.digest()

    def _function(self, function: types.FunctionType, depth: int) -> None:
        taken = _closure(function)
        if internals.is_of_torch(function):
            self._items("torch", taken.values(), depth)  # its wrappers hold users' functions
            self._say(_name(function))
            return
        if function.__module__ in _pure and function.__globals__.get("__name__") in _pure:
            self._items("pure", taken.values(), depth)
            self._say(_name(function))
            return
        self._say("function")
        names = self._code(function.__code__, depth)
        self.value(function.__defaults__, depth + 1)
        self.value(function.__kwdefaults__, depth + 1)
        attributes = {name: part for name, part in vars(function).items() if name != "__wrapped__"}
        if attributes:
            self.value(attributes, depth + 1)
        for asked in sorted(_asks_process.intersection(names)):
            self._miss(f"{_name(function)} names {asked}")
        known = function.__globals__
        for name in sorted(_globals_asked(function.__code__) & _asks_anything - {*known}):
            self._miss(f"{_name(function)} calls {name}")
        taken |= {name: known[name] for name in names if name in known}
        taken |= _imports(function.__code__)
        self._taken(taken, names, depth)

    def _taken(self, taken: Mapping[str, object], names: list[str], depth: int) -> None:
        """What is referred to by name, and of modules that are not torch's what is used of them."""
        for name, value in sorted(taken.items()):
            self._say(name)
            if isinstance(value, types.ModuleType) and not _is_covered(value):
                self._say("module", value.__name__, getattr(value, "__version__", ""))
                if value.__name__.partition(".")[0] in sys.stdlib_module_names:
                    self._miss(f"uses the module {value.__name__}")
                elif depth <= _MAX_DEPTH:
                    members = {name: vars(value)[name] for name in names if name in vars(value)}
                    self._taken(members, names, depth + 1)
            else:
                self.value(value, depth + 1)

    def _code(self, code: types.CodeType, depth: int) -> list[str]:
        """Returns all the names that it, or code inside of it, may take from somewhere else."""
        self._say(
            code.co_code.hex(),
            code.co_argcount,
            code.co_posonlyargcount,
            code.co_kwonlyargcount,
            code.co_flags,
            len(code.co_varnames),
            getattr(code, "co_exceptiontable", b"").hex(),
        )
        names = list(code.co_names)
        self._say(*names, "constants")
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                names += self._code(constant, depth)
            else:
                self.value(constant, depth + 1)
                if isinstance(constant, str) and constant.isidentifier():  # for getattr
                    names.append(constant)
        return sorted(set(names))

    def _native(self, value: object, depth: int) -> None:
        """Functions in C: those of Python and torch are covered by their versions."""
        owner = getattr(value, "__self__", None)
        kind = getattr(value, "__objclass__", None) or type(owner)
        home = str(getattr(value, "__module__", None) or kind.__module__).partition(".")[0]
        self._say("native", home, getattr(value, "__qualname__", ""))
        if home != "torch" and home not in _pure:
            self._miss(f"calls {_name(value)}, which is not in Python")
        if not isinstance(owner, (type, types.ModuleType, type(None))):
            self.value(owner, depth + 1)

    def _class(self, kind: type, depth: int) -> None:
        self._say("named", _name(kind))
        for base in kind.__mro__:
            home = base.__module__.partition(".")[0]
            if home == "torch" or home in _pure:
                self._say("base", _name(base))
                continue
            for name, member in sorted(vars(base).items()):
                if name in _about_classes or isinstance(member, _SLOTS):
                    continue
                self._say(name)
                self.value(member, depth + 1)

    def _tensor(self, value: Tensor) -> None:
        import torch

        self._say("tensor", _name(type(value)), value.dtype, tuple(value.shape), value.device)
        plain = type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_quantized
        seen = plain and value.layout is torch.strided and value.device.type == "cpu"
        with internals.without_modes.get()(), torch.no_grad():
            if seen and value.numel() <= _MAX_ELEMENTS:
                data = value.resolve_conj().resolve_neg().contiguous().reshape(-1)
                self._say(data.view(torch.uint8).tolist())
            else:
                self._say(repr(value))
                self._miss("refers to a tensor that is large, of a class of its own, or elsewhere")

    def _object(self, value: object, depth: int) -> None:
        kind = type(value)
        self._say("object", _name(kind))
        self.value(kind, depth + 1)
        slots = [
            name
            for base in kind.__mro__
            for name, member in sorted(vars(base).items())
            if isinstance(member, types.MemberDescriptorType) and hasattr(value, name)
        ]
        state = getattr(value, "__dict__", None)
        if (state is None and not slots) or any(map(_is_native, kind.__mro__)):
            self._miss(f"refers to a {_name(kind)}, whose state cannot be seen")
        self.value({name: getattr(value, name) for name in slots}, depth + 1)
        self.value(dict(state or {}), depth + 1)


def _is_native(kind: type) -> bool:
    """Whether objects of a class have something that only C sees."""
    of_python = kind.__flags__ & _HEAP_TYPE and not kind.__module__.startswith("torch._C")
    return kind is not object and not of_python


_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: what a class statement makes
_SLOTS = (types.MemberDescriptorType, types.GetSetDescriptorType)


def _closure(function: types.FunctionType) -> dict[str, object]:
    """What a function has from the one that it was made in, by name."""
    taken: dict[str, object] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            taken[name] = cell.cell_contents
        except ValueError:  # not filled yet
            taken[name] = None
    return taken


def _imports(code: types.CodeType) -> dict[str, object]:
    """Modules that code imports when it runs, as far as they are imported yet."""
    return {
        f"import {instruction.argval}": sys.modules.get(str(instruction.argval))
        for inner in _nested(code)
        for instruction in dis.get_instructions(inner)
        if instruction.opname == "IMPORT_NAME"
    }


def _globals_asked(code: types.CodeType) -> set[str]:
    return {
        str(instruction.argval)
        for inner in _nested(code)
        for instruction in dis.get_instructions(inner)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


def _library(value: object) -> str | None:
    """The name and version of the library of Inductor's that a class or function lies in, if so."""
    if not isinstance(value, (type, types.FunctionType)):
        return None
    root = _home(value).partition(".")[0]
    package = sys.modules.get(root) if root in _OF_INDUCTOR else None
    if package is None:
        return None
    if isinstance(value, types.FunctionType):
        inside = value.__code__.co_filename.startswith(os.path.dirname(str(package.__file__)))
    else:
        inside = getattr(sys.modules.get(value.__module__), value.__qualname__, None) is value
    return f"{root} {getattr(package, '__version__', '')}" if inside else None


def _is_torchs(value: object) -> bool:
    """Part of torch or built in: versions in the key say which one."""
    name = value.__name__ if isinstance(value, types.ModuleType) else _home(value)
    return name.partition(".")[0] in ("torch", "builtins")


def _is_covered(module: types.ModuleType) -> bool:
    """Whether versions in the key say what a module does, and it reads nothing else."""
    return _is_torchs(module) or module.__name__.partition(".")[0] in _pure


def _home(value: object) -> str:
    home = getattr(value, "__module__", None)
    return home if isinstance(home, str) else str(type(value).__module__)


def _name(value: object) -> str:
    return f"{_home(value)}.{getattr(value, '__qualname__', type(value).__qualname__)}"
