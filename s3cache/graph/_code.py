"""A digest of what a Python function does: of its code, and of what that code refers to.

Two functions with equal digests behave alike, as far as can be seen without running them. File
names, line numbers and names of local variables do not matter; constants, defaults, closures and
the functions and values that are referred to by name do.
"""

from __future__ import annotations

import enum
import hashlib
import types
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from s3cache.torch_api import internals

if TYPE_CHECKING:
    from s3cache.torch_api.protocols import Function

__all__ = ["fingerprint"]

_MAX_DEPTH = 12
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...))


def fingerprint(function: Function[object]) -> str:
    """32 hexadecimal digits, the same in every process with the same Python and torch."""
    walk = _Walk()
    walk.value(function, 0)
    return walk.digest()


class _Walk:
    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._order: dict[int, int] = {}
        self._kept: list[object] = []  # an id is only good while its object lives

    def digest(self) -> str:
        return self._hash.hexdigest()[:32]

    def _say(self, *words: object) -> None:
        for word in words:
            text = str(word).encode()
            self._hash.update(f"{len(text)}:".encode() + text)

    def value(self, value: object, depth: int) -> None:
        if isinstance(value, _PLAIN):
            self._say(type(value).__name__, repr(value))
        elif id(value) in self._order:
            self._say("again", self._order[id(value)])
        elif depth > _MAX_DEPTH:
            self._say("deep", _name(value))
        else:
            self._order[id(value)] = len(self._order)
            self._kept.append(value)
            self._new(value, depth)

    def _new(self, value: object, depth: int) -> None:
        if isinstance(value, (list, tuple)):
            self._items(type(value).__name__, value, depth)
        elif isinstance(value, (set, frozenset)):
            self._say(type(value).__name__, *sorted(_alone(member) for member in value))
        elif isinstance(value, dict):
            self._say("dict", *sorted(_alone(item) for item in value.items()))
        elif isinstance(value, partial):
            self._items("partial", (value.func, value.args, value.keywords), depth)
        elif isinstance(value, types.MethodType):
            self._items("method", (value.__func__, value.__self__), depth)
        elif isinstance(value, types.FunctionType):
            self._function(value, depth)
        elif isinstance(value, types.ModuleType):
            self._say("module", value.__name__, getattr(value, "__version__", ""))
        elif isinstance(value, (type, enum.Enum)) or _is_torchs(value):
            self._named(value, depth)
        else:
            self._object(value, depth)

    def _items(self, kind: str, values: Iterable[object], depth: int) -> None:
        self._say(kind)
        for item in values:
            self.value(item, depth + 1)
        self._say("end")

    def _function(self, function: types.FunctionType, depth: int) -> None:
        for cell in function.__closure__ or ():  # torch's wrappers hold users' functions
            try:
                self.value(cell.cell_contents, depth + 1)
            except ValueError:  # not filled yet
                self._say("empty")
        if internals.is_of_torch(function):
            self._say("torch", _name(function))
            return
        self._say("function")
        names = self._code(function.__code__, depth)
        self.value(function.__defaults__, depth + 1)
        self.value(function.__kwdefaults__, depth + 1)
        for name in names:
            if name not in function.__globals__:
                continue
            value = function.__globals__[name]
            self._say(name)
            self.value(value, depth + 1)
            if isinstance(value, types.ModuleType) and not _is_torchs(value):
                self._from_module(value, names, depth)

    def _from_module(self, module: types.ModuleType, names: list[str], depth: int) -> None:
        """``helpers.scale(x)``: what is taken from a module, not all of it."""
        for name in names:
            value = vars(module).get(name)
            if isinstance(value, (types.FunctionType, *_PLAIN)):
                self._say(name)
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
        return sorted(set(names))

    def _named(self, value: object, depth: int) -> None:
        self._say("named", _name(value), repr(value) if not callable(value) else "")
        if isinstance(value, type) and not _is_torchs(value) and value.__module__ != "builtins":
            members = sorted((n, m) for n, m in vars(value).items() if _is_member(m))
            for name, member in members:
                self._say(name)
                self.value(getattr(member, "__func__", member), depth + 1)

    def _object(self, value: object, depth: int) -> None:
        import torch

        self._say("object", _name(type(value)))
        if isinstance(value, torch.Tensor):
            self._say(value.dtype, tuple(value.shape), value.device)
            if value.device.type == "cpu" and value.numel() <= 4096 and not value.is_quantized:
                self._say(value.detach().tolist())
            return
        self.value(type(value), depth + 1)
        self.value(dict(getattr(value, "__dict__", {})), depth + 1)


def _alone(value: object) -> str:
    walk = _Walk()
    walk.value(value, _MAX_DEPTH // 2)
    return walk.digest()


def _is_member(value: object) -> bool:
    return isinstance(value, (types.FunctionType, staticmethod, classmethod, *_PLAIN))


def _is_torchs(value: object) -> bool:
    """Part of torch or built in: versions in the key say which one."""
    name = value.__name__ if isinstance(value, types.ModuleType) else _home(value)
    return name.partition(".")[0] in ("torch", "builtins")


def _home(value: object) -> str:
    home = getattr(value, "__module__", None)
    return home if isinstance(home, str) else str(type(value).__module__)


def _name(value: object) -> str:
    return f"{_home(value)}.{getattr(value, '__qualname__', type(value).__qualname__)}"
