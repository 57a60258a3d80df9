"""Python kernels that other libraries, or programs, have registered for torch's own operators.

The dispatcher keeps functions where nobody can read them. It only says which keys an operator has
kernels for, and the file that registered each.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from functools import partial
from types import FunctionType, MethodType

import _s3cache_autoload
from s3cache.graph._distribution import origin_of
from s3cache.graph._identity import content_of
from s3cache.graph._whose import is_foreign
from s3cache.torch_api import internals

__all__ = ["forget_kernels", "is_native", "is_of_torch", "record_kernel", "replaced_kernels"]

_kernels: dict[str, object] = {}  # functions, by operator and key, as torch has them
_replaced: tuple[object, dict[str, object]] | None = None
_torchs: dict[int, object] = {}  # functions that are torch's, by id, and kept
_times_recorded = 0
_is_unwatched = False  # now or at some time before, so what ``import torch`` left may be replaced
_NATIVE = (".c", ".cc", ".cpp", ".cu", ".cuh", ".cxx", ".h", ".hpp", ".mm")


def record_kernel(where: str, function: object) -> None:
    """Note that ``function`` is registered from now on, for an operator and key as torch has them.

    It may replace a kernel of torch's, which nothing else shows.
    """
    global _times_recorded
    _kernels[where] = function
    _times_recorded += 1


def forget_kernels() -> None:
    """Forget what was recorded: what is known may be replaced from now on without a trace."""
    global _replaced, _is_unwatched
    _kernels.clear()
    _registered_at.cache_clear()
    _replaced = None
    _is_unwatched = True


def is_native(path: str) -> bool:
    """Return True if what is registered from ``path`` was compiled."""
    return path.endswith(_NATIVE)


def replaced_kernels() -> dict[str, object]:
    """Return kernels in Python that others than torch registered for torch's own operators.

    By operator and key, as torch has them: the function, if it was recorded, or the file that
    registered it.
    """
    global _replaced
    present = internals.python_kernels()
    new = set(present) if _is_unwatched else present - _s3cache_autoload.kernels
    seen = present & _kernels.keys()
    state = _times_recorded, seen, new
    if _replaced is None or _replaced[0] != state:
        _replaced = state, dict(_find_replaced(seen, new))
    return _replaced[1]


def _find_replaced(seen: set[str], new: set[str]) -> Iterator[tuple[str, object]]:
    for where in sorted(seen | new):
        name, key = _named(where)
        if where in seen and not _is_torchs(_kernels[where]):
            if is_of_torch(name):
                yield where, _kernels[where]
        elif where in new and (path := _path_of_others(name, key)) and is_of_torch(name):
            yield where, path


def _is_torchs(function: object) -> bool:
    """Return True if a function is torch's, and what torch made it of: asked of hundreds."""
    if id(function) in _torchs:
        return True
    if any(is_foreign(each, "") for each in (function, *_formulas_in(function, 0))):
        return False
    _torchs[id(function)] = function
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


_MAX_DEPTH = 4


def is_of_torch(name: str) -> bool:
    """Whether torch defines the operator: by where that is done, whatever its namespace is called.

    Decompositions and fallbacks reach such ones, which no graph names.
    """
    return name.startswith("aten::") or _is_defined_by_torch(name)


@functools.cache
def _is_defined_by_torch(name: str) -> bool:
    defined = internals.DEFINED_AT.search(internals.dispatch_dump.get()(name))
    if defined is None:
        return False
    if defined[1].startswith(_for_others()):
        definition = internals.custom_operators.get().get(name)
        return definition is not None and origin_of(definition._init_fn).kind == "torch"
    built_in = internals.built_in()
    home = internals.torch_directory()
    return defined[1].startswith((home, built_in) if built_in else home)


def _named(where: str) -> tuple[str, str]:
    """Operator and key of a kernel."""
    name, _, key = where.rpartition("/")
    return name.replace("/", "::", 1), key


def _path_of_others(name: str, key: str) -> str:
    """Return the file that registers a kernel, if it is not torch's own doing; or ``""``.

    What registers for others is a file of torch's as well, which torch uses for no operator of
    ATen.
    """
    paths = [path for each, path in _registered_at(name) if each == key]
    if not paths:  # since it was asked for
        _registered_at.cache_clear()
        paths = [path for each, path in _registered_at(name) if each == key]
    home = internals.torch_directory()
    for_others = _for_others() if name.startswith("aten::") else ()
    found = (path for path in paths if path.startswith(for_others) or not path.startswith(home))
    return next(found, "")


@functools.cache
def _registered_at(name: str) -> list[tuple[str, str]]:
    """The keys that an operator has kernels in Python for, and the files that registered those."""
    return [
        (key.partition("[")[0], path)
        for key, path in internals.REGISTERED_AT.findall(internals.dispatch_dump.get()(name))
        if not is_native(path)
    ]


@functools.cache
def _for_others() -> tuple[str, ...]:
    home = internals.torch_directory()
    return os.path.join(home, "library.py"), os.path.join(home, "_library") + os.sep
