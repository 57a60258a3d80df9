"""Unpickle an entry that names objects beyond the list: decide what is called, and what is data.

Such an entry may also name data classes and enumerations of torch and some other packages, names
defined in a module of the program that this process has imported, and nodes of sympy's expressions.
They are restored without a call of their constructors, functions or ``__setstate__``.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import ClassVar, Final, cast

from s3cache.artifact._artifact import check_imported, computes, is_listed, refused
from s3cache.errors import CorruptError
from s3cache.torch_api import internals
from s3cache.torch_api.protocols import Function

# Packages with functions that run their arguments or load files: allow only their data, and listed
# names.
_KNOWN: Final = frozenset({"torch", "functorch", "torchgen", "sympy", "mpmath", "numpy", "s3cache"})
# Packages with classes that may have their own __setstate__.
_SET_STATES: Final = frozenset({"dataclasses", "torch", "sympy", "triton"})
_WOULD_RUN: Final = "would run code while an entry is read"

_Load = Callable[["Careful"], None]
_LOADS: Final[Mapping[int, _Load]] = vars(pickle._Unpickler)["dispatch"]


class Careful(pickle._Unpickler):
    """Python's slow unpickler in Python, which lets us intercept calls.

    Listed names are called. An object of any other class is created without its constructor, and
    its attributes are set without its functions.
    """

    stack: list[object]
    memo: dict[int, object]
    dispatch: ClassVar[dict[int, _Load]] = dict(_LOADS)  # type: ignore[assignment]

    def __init__(self, content: io.BytesIO, stand_ins: Mapping[str, Function[object]]) -> None:
        super().__init__(content)
        self._stand_ins = stand_ins
        self._listed: list[object] = list(stand_ins.values())

    def find_class(self, module: str, name: str) -> object:
        full = f"{module}.{name}"
        if full in self._stand_ins:
            return self._stand_ins[full]
        check_imported(module, name)
        found: object = super().find_class(module, name)
        if is_listed(module, name):
            self._listed.append(found)
        elif not _may_be_named(module, name, found):
            raise refused(full)
        return found

    def _is_listed(self, found: object) -> bool:
        return any(found is each for each in self._listed)

    def _load_reduce(self) -> None:
        function, args = self.stack[-2:]
        if not (
            self._is_listed(function)
            or isinstance(function, enum.EnumMeta)
            or (isinstance(function, type) and _is_exception(function))
            or _is_node(function, args)
        ):
            raise refused(function, "is called while an entry is read")
        _LOADS[pickle.REDUCE[0]](self)

    def _load_new(self) -> None:
        self._check_new(*self.stack[-2:])
        _LOADS[pickle.NEWOBJ[0]](self)

    def _load_new_with_names(self) -> None:
        cls, args, kwargs = self.stack[-3:]
        self._check_new(cls, (*cast("Iterable[object]", args), kwargs))
        _LOADS[pickle.NEWOBJ_EX[0]](self)

    def _check_new(self, cls: object, args: object) -> None:
        if not (self._is_listed(cls) or _is_inert(cls) or _is_node(cls, args)):
            raise refused(cls, _WOULD_RUN)

    def _load_build(self) -> None:
        made = self.stack[-2]
        sets = getattr(type(made), "__setstate__", None)
        if isinstance(made, (type, FunctionType, ModuleType)) or (
            isinstance(sets, FunctionType)
            and not self._is_listed(type(made))
            and sets.__module__.partition(".")[0] not in _SET_STATES
        ):
            raise refused(type(made), _WOULD_RUN)
        _LOADS[pickle.BUILD[0]](self)

    def _load_old(self) -> None:
        raise CorruptError("entry", "is a pickle of protocol 1 or before")

    dispatch[pickle.REDUCE[0]] = _load_reduce
    dispatch[pickle.NEWOBJ[0]] = _load_new
    dispatch[pickle.NEWOBJ_EX[0]] = _load_new_with_names
    dispatch[pickle.BUILD[0]] = _load_build
    dispatch[pickle.OBJ[0]] = dispatch[pickle.INST[0]] = _load_old


def _may_be_named(module: str, name: str, found: object) -> bool:
    import torch

    package = module.partition(".")[0]
    if isinstance(found, (FunctionType, BuiltinFunctionType)) and computes(module, name):
        return found.__module__ is None or found.__module__ == module
    if not isinstance(found, (type, FunctionType)):
        # A type or format of data
        return type(found).__module__ == "torch" and type(found).__name__ in internals.FORMATS
    # Only under the name of its definition, not where it was imported.
    if (found.__module__, found.__qualname__) != (module, name):
        return False
    is_of_python = package in sys.stdlib_module_names
    if isinstance(found, type):
        if _is_exception(found):
            return True
        if _is_data(found):
            return not is_of_python
        is_tensor = issubclass(found, torch.Tensor)
        if is_tensor or found.__module__ == internals.VIEWS or _is_expression(found):
            return True
    return package not in _KNOWN and not is_of_python


def _is_data(cls: type) -> bool:
    named = issubclass(cls, tuple) and hasattr(cls, "_fields")
    return named or isinstance(cls, enum.EnumMeta) or dataclasses.is_dataclass(cls)


def _is_expression(cls: type) -> bool:
    """Return whether objects of this class are expressions over sizes, or their operands."""
    import sympy  # type: ignore[import-untyped]

    return issubclass(cls, sympy.Basic)


def _is_exception(cls: type) -> bool:
    return cls.__module__ == "builtins" and issubclass(cls, BaseException)


def _is_inert(cls: object) -> bool:
    """Return whether an object of ``cls`` can be created without running any of its code."""
    if not isinstance(cls, type) or hasattr(cls, "__del__"):
        return False
    made = cls.__new__
    # That of a NamedTuple is made by Python, in a generated module.
    return isinstance(made, BuiltinFunctionType) or (
        issubclass(cls, tuple) and made.__module__.startswith("namedtuple_")
    )


def _is_node(cls: object, args: object) -> bool:
    """Return whether this makes a sympy node of nodes and numbers; sympy would evaluate text."""
    if not (isinstance(cls, type) and _is_expression(cls)):
        return False
    operands: list[object] = []
    for arg in cast("Iterable[object]", args):
        operands += arg.values() if isinstance(arg, dict) else [arg]
    return all(
        operand is None or isinstance(operand, (int, float)) or _is_expression(type(operand))
        for operand in operands
    )
