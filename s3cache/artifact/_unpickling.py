"""Unpickling an entry: by classes that compiled graphs are made of, and by few functions.

A pickle may name anything that Python can import, and call it. Here it names

- classes of modules that this program has imported by itself, and of torch, sympy and the like;
- functions that such a module defines, unless it is torch's or an installed library's of which
  we know (``_BY_NAME``): of those only what rebuilds values;
- of Python's own library what holds data.

It is a second line, behind digests and signatures, and a thin one: what is unpickled holds native
code and Python source that run when the graph does. What it stops is a pickle that runs something
else while it is read, and what would be imported for it.
"""

from __future__ import annotations

import enum
import io
import pickle
import sys
from types import BuiltinFunctionType, FunctionType, MappingProxyType
from typing import Final

from s3cache.errors import CorruptError
from s3cache.store import Buffer
from s3cache.torch_api import internals

__all__ = ["unpickled"]

# Packages with functions that run what they are given, or load what lies elsewhere.
_BY_NAME: Final = frozenset(
    {"torch", "functorch", "torchgen", "sympy", "mpmath", "numpy", "s3cache"}
)
# Their modules may be imported for an entry: that does nothing else.
_IMPORTABLE: Final = frozenset({"torch", "sympy", "mpmath", "numpy", "triton"})
_FUNCTIONS: Final = frozenset(
    {
        ("_codecs", "encode"),
        ("_functools", "reduce"),  # of operator.or_: unions of types
        ("_operator", "getitem"),
        ("_operator", "or_"),
        ("builtins", "Ellipsis"),
        ("builtins", "NotImplemented"),
        ("copyreg", "__newobj__"),
        ("copyreg", "__newobj_ex__"),
        ("copyreg", "_reconstructor"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "scalar"),
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy.core.multiarray", "scalar"),
        ("re", "_compile"),
        *internals.UNPICKLED_FUNCTIONS,
    }
)
#: Of Python's own library: the classes in these modules, or those of them that are named.
_LIBRARY: Final = MappingProxyType(
    {
        "_io": ("BytesIO", "StringIO"),
        "array": ("array",),
        "builtins": (
            "bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int", "list",
            "object", "range", "set", "slice", "str", "tuple", "type",
        ),
        "collections": (),
        "dataclasses": (),
        "datetime": (),
        "decimal": (),
        "enum": (),
        "fractions": (),
        "functools": ("partial",),
        "inspect": ("Parameter", "Signature", "_ParameterKind", "_empty"),
        "ipaddress": (),
        "numbers": (),
        "pathlib": (),
        "pathlib._local": (),
        "types": (
            "EllipsisType", "GenericAlias", "MappingProxyType", "NoneType", "NotImplementedType",
            "SimpleNamespace", "UnionType",
        ),
        "re": ("RegexFlag",),
        "typing": (),
        "uuid": (),
        "zoneinfo": (),
    }
)  # fmt: skip


def unpickled(content: Buffer) -> object:
    """What is in the verified bytes of an entry.

    Raises:
        CorruptError: it names what no compiled graph needs.
        Exception: whatever unpickling meets.
    """
    return _Unpickler(io.BytesIO(content)).load()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        """What ``module`` has by that name, if it is one of those that may be called.

        Raises:
            CorruptError: it is not.
        """
        package = module.partition(".")[0]
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) == internals.UNPICKLED_STORAGE:
            return _storage
        if not (module in sys.modules or package in _IMPORTABLE or module in _LIBRARY):
            raise CorruptError(f"name {module}.{name}", "is of a module that is not imported here")
        found: object = super().find_class(module, name)
        if not _is_admitted(package, module, name, found):
            raise CorruptError(f"name {module}.{name}", "is nothing that a compiled graph needs")
        return found


def _is_admitted(package: str, module: str, name: str, found: object) -> bool:
    if (module, name) in _FUNCTIONS or internals.rebuilds(module, name):
        return True
    if isinstance(found, type):
        return _is_class_admitted(found)
    if isinstance(found, (FunctionType, BuiltinFunctionType)) and internals.computes(module, name):
        return found.__module__ is None or found.__module__ == module
    if isinstance(found, FunctionType):
        # Where it is defined, and not where somebody has imported it.
        return (found.__module__, found.__qualname__) == (module, name) and not (
            package in _BY_NAME or package in sys.stdlib_module_names
        )
    # Types of data, formats and the like, which are pickled by name.
    return (
        package == "torch"
        and type(found).__module__.partition(".")[0] == "torch"
        and not (callable(found))
    )


def _is_class_admitted(cls: type) -> bool:
    """By where it is from, under whatever name it is known elsewhere."""
    package = cls.__module__.partition(".")[0]
    if package not in sys.stdlib_module_names:
        return True
    if issubclass(cls, BaseException) and cls.__module__ == "builtins":
        return True
    names = _LIBRARY.get(cls.__module__)
    return names is not None and (not names or cls.__qualname__ in names)


def _member(owner: object, name: str) -> object:
    """In place of ``getattr``, by which members of enumerations and operators may be pickled."""
    if isinstance(owner, enum.EnumMeta) and name in owner.__members__:
        return owner.__members__[name]
    if isinstance(owner, type) and internals.computes(f"{owner.__module__}.{owner.__name__}", name):
        found: object = getattr(owner, name)
        if isinstance(found, BuiltinFunctionType):
            return found
    raise CorruptError(f"attribute {name[:80]}", "is nothing that a compiled graph needs")


def _storage(content: bytes) -> object:
    """In place of torch's own, which unpickles by any class."""
    import torch

    return torch.load(io.BytesIO(content), weights_only=True)
