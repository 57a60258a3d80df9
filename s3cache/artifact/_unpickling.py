"""Unpickling an entry: what may be called is on a list, and all else has to be data.

A pickle may name anything that Python can import, and call it. Here it may

- name and call what is listed (``torch_api/internals.py``), and functions over tensors;
- name data classes and enumerations of torch and the like, what a module of the program defines
  that this process has imported, and nodes of sympy's expressions. These come back without a call
  of their constructors, functions or ``__setstate__``: see :class:`_Careful`.

It is a second line, behind digests and signatures, and a thin one: what is unpickled holds native
code and Python source that run when the graph does, and a listed function makes a graph module of
its source. What it stops is a pickle that runs something else while it is read, and what would be
imported for it.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import io
import operator
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import ClassVar, Final, cast

from s3cache.errors import CorruptError
from s3cache.store import Buffer
from s3cache.torch_api import internals
from s3cache.torch_api.protocols import Function

__all__ = ["unpickled"]

# Packages with much that runs what it is given, or loads what lies elsewhere: nothing of theirs but
# data, and what is listed.
_KNOWN: Final = frozenset({"torch", "functorch", "torchgen", "sympy", "mpmath", "numpy", "s3cache"})
# Their modules may be imported for an entry: that does nothing else.
_IMPORTABLE: Final = frozenset({"torch", "sympy", "numpy", "triton"})


def unpickled(content: Buffer) -> object:
    """Return what is in the verified bytes of an entry.

    Raises:
        CorruptError: it names, or calls, what no compiled graph needs.
        Exception: whatever unpickling meets.
    """
    try:
        return _load(_Listed(io.BytesIO(content)))
    except _UnlistedError:
        return _load(_Careful(io.BytesIO(content)))


def _load(reader: _Listed | _Careful) -> object:
    try:
        return reader.load()
    except BaseException:
        # Compiled graphs that were only begun have no attributes yet, and torch's __del__ asks for
        # one: Python would print that on stderr.
        made: object
        for made in reader.memo.copy().values():
            if isinstance(made, internals.compiled_graph.get()):
                made.__dict__.setdefault(internals.RUNNER, None)
        raise


class _UnlistedError(Exception):
    """It names something that has to be read with care."""


class _Listed(pickle.Unpickler):
    """Knows what is listed, and nothing else: nearly every entry needs no more."""

    def find_class(self, module: str, name: str) -> object:
        instead = _INSTEAD.get(f"{module}.{name}")
        if instead is not None:
            return instead
        if not is_listed(module, name):
            raise _UnlistedError
        _check_imported(module, name)
        return super().find_class(module, name)


_Load = Callable[["_Careful"], None]
_LOADS: Final[Mapping[int, _Load]] = vars(pickle._Unpickler)["dispatch"]


class _Careful(pickle._Unpickler):
    """Python's unpickler in Python, slow as it is: it shows what a pickle calls.

    What is listed is called. An object of any other class is made without its constructor, and gets
    its attributes without a function of its own.
    """

    stack: list[object]
    memo: dict[int, object]
    dispatch: ClassVar[dict[int, _Load]] = dict(_LOADS)  # type: ignore[assignment]

    def __init__(self, content: io.BytesIO) -> None:
        super().__init__(content)
        self._listed: list[object] = list(_INSTEAD.values())

    def find_class(self, module: str, name: str) -> object:
        full = f"{module}.{name}"
        if full in _INSTEAD:
            return _INSTEAD[full]
        _check_imported(module, name)
        found: object = super().find_class(module, name)
        if is_listed(module, name):
            self._listed.append(found)
        elif not _may_be_named(module, name, found):
            raise _refused(full)
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
            raise _refused(_named(function), "is called while an entry is read")
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
            raise _refused(_named(cls), "would run code while an entry is read")

    def _load_build(self) -> None:
        made = self.stack[-2]
        sets = getattr(type(made), "__setstate__", None)
        if isinstance(made, (type, FunctionType, ModuleType)) or (
            isinstance(sets, FunctionType)
            and not self._is_listed(type(made))
            and sets.__module__.partition(".")[0] not in ("dataclasses", "torch", "sympy", "triton")
        ):
            raise _refused(_named(type(made)), "would run code while an entry is read")
        _LOADS[pickle.BUILD[0]](self)

    def _load_old(self) -> None:
        raise CorruptError("entry", "is a pickle of protocol 1 or before")

    dispatch[pickle.REDUCE[0]] = _load_reduce
    dispatch[pickle.NEWOBJ[0]] = _load_new
    dispatch[pickle.NEWOBJ_EX[0]] = _load_new_with_names
    dispatch[pickle.BUILD[0]] = _load_build
    dispatch[pickle.OBJ[0]] = dispatch[pickle.INST[0]] = _load_old


def is_listed(module: str, name: str) -> bool:
    """Return whether an entry may name and call what ``module`` has by that name."""
    return f"{module}.{name}" in internals.UNPICKLED or (
        module == internals.SOURCES and name.isidentifier() and name.endswith("Source")
    )


def _computes(module: str, name: str) -> bool:
    """Return whether this is a function over tensors, as an activation that a subclass keeps."""
    return module in internals.COMPUTING or (module == internals.FUNCTIONS and name != "from_file")


def _is_plain(found: object) -> bool:
    """Return whether this is a type or format of data, or a class of tensors, or of views."""
    import torch

    if isinstance(found, type):
        return issubclass(found, torch.Tensor) or found.__module__ == internals.VIEWS
    return type(found).__module__ == "torch" and type(found).__name__ in internals.FORMATS


def _is_expression(cls: type) -> bool:
    """Return whether objects of this class are expressions over sizes, or operands of some."""
    import sympy  # type: ignore[import-untyped]

    return issubclass(cls, sympy.Basic)


def _check_imported(module: str, name: str) -> None:
    package = module.partition(".")[0]
    if not (
        module in sys.modules
        or package in _IMPORTABLE
        or (package in sys.stdlib_module_names and is_listed(module, name))
    ):
        raise CorruptError(f"name {module}.{name}", "is of a module that is not imported here")


def _may_be_named(module: str, name: str, found: object) -> bool:
    package = module.partition(".")[0]
    if isinstance(found, (FunctionType, BuiltinFunctionType)) and _computes(module, name):
        return found.__module__ is None or found.__module__ == module
    if isinstance(found, (type, FunctionType)):
        # Where it is defined, and not where somebody has imported it.
        if (found.__module__, found.__qualname__) != (module, name):
            return False
        if isinstance(found, type) and (_is_data(found) or _is_exception(found)):
            return package not in sys.stdlib_module_names or _is_exception(found)
        if _is_plain(found) or (isinstance(found, type) and _is_expression(found)):
            return True
        return package not in _KNOWN and package not in sys.stdlib_module_names
    return _is_plain(found)


def _is_data(cls: type) -> bool:
    named = issubclass(cls, tuple) and hasattr(cls, "_fields")
    return named or isinstance(cls, enum.EnumMeta) or dataclasses.is_dataclass(cls)


def _is_exception(cls: type) -> bool:
    return cls.__module__ == "builtins" and issubclass(cls, BaseException)


def _is_inert(cls: object) -> bool:
    """Return whether making an object of it, without its constructor, runs nothing."""
    if not isinstance(cls, type) or hasattr(cls, "__del__"):
        return False
    made = cls.__new__
    # That of a NamedTuple is Python's own, in a module of its making.
    return isinstance(made, BuiltinFunctionType) or (
        issubclass(cls, tuple) and made.__module__.startswith("namedtuple_")
    )


def _is_node(cls: object, args: object) -> bool:
    """Return whether this makes a node of sympy's of nodes and numbers: text it would evaluate."""
    if not (isinstance(cls, type) and _is_expression(cls)):
        return False
    operands: list[object] = []
    for arg in cast("Iterable[object]", args):
        operands += arg.values() if isinstance(arg, dict) else [arg]
    return all(
        operand is None or isinstance(operand, (int, float)) or _is_expression(type(operand))
        for operand in operands
    )


def _named(found: object) -> str:
    names = [getattr(found, name, "") for name in ("__module__", "__qualname__")]
    return ".".join(map(str, names)) if all(names) else f"of a {type(found).__qualname__}"


def _refused(name: str, why: str = "is nothing that a compiled graph needs") -> CorruptError:
    listed = "what graphs need is listed in torch_api/internals.py"
    return CorruptError(f"name {name[:200]}", f"{why} ({listed})")


def _member(owner: object, name: str) -> object:
    """Stand in for ``getattr``, by which members of enumerations and operators may be pickled."""
    if isinstance(owner, enum.EnumMeta) and name in owner.__members__:
        return owner.__members__[name]
    if isinstance(owner, type) and _computes(f"{owner.__module__}.{owner.__name__}", name):
        found: object = getattr(owner, name)
        if isinstance(found, BuiltinFunctionType):
            return found
    raise CorruptError(f"attribute {name[:80]}", "is nothing that a compiled graph needs")


def _storage(content: bytes) -> object:
    """Stand in for torch's own, which unpickles by any class."""
    import torch

    return torch.load(io.BytesIO(content), weights_only=True)


def _union(_: object, types: Iterable[object]) -> object:
    """Stand in for ``functools.reduce``, by which unions of types are pickled."""
    return functools.reduce(operator.or_, types)


def _subclassed(function: object, *args: object) -> object:
    """Stand in for torch's own, which calls any function."""
    if not isinstance(function, FunctionType) or not is_listed(
        function.__module__, function.__qualname__
    ):
        raise _refused(_named(function), "is called while an entry is read")
    return internals.rebuild_subclass.get()(function, *args)


_INSTEAD: Final[Mapping[str, Function[object]]] = {
    "_functools.reduce": _union,
    "builtins.getattr": _member,
    internals.UNPICKLED_STORAGE: _storage,
    internals.UNPICKLED_SUBCLASS: _subclassed,
}
