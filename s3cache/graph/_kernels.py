"""Kernels in Python that others than torch registered for torch's own operators.

The dispatcher keeps functions where nothing can read them. It only says which keys an operator has
kernels for, and the file that registered each. A function is known if it was registered while a
cache was enabled. What torch keeps beside the dispatcher, such as fake implementations, is read
from there.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from functools import partial
from types import FunctionType, MethodType

import _s3cache_autoload
from s3cache.graph._identity import origin_of
from s3cache.graph._origin import is_foreign
from s3cache.torch_api import internals
from s3cache.util.snapshot import content_of

__all__ = [
    "foreign_fakes",
    "forget_kernels",
    "is_of_torch",
    "record_kernel",
    "replaced_kernels",
]

_NATIVE = (".c", ".cc", ".cpp", ".cu", ".cuh", ".cxx", ".h", ".hpp", ".mm")
_MAX_DEPTH = 4


class _Recorded:
    """Kernels that were registered while a cache was enabled, and what was found of them."""

    def __init__(self, *, is_complete: bool) -> None:
        self.is_complete = is_complete  # since `import torch`: no kernel of torch's was replaced
        self.kernels: dict[str, object] = {}  # by operator and key, as torch has them
        self.count = 0
        self.last: tuple[object, dict[str, object]] | None = None


_recorded = _Recorded(is_complete=True)
_torchs: dict[int, object] = {}  # functions of torch's, by id: hundreds, and they stay


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
    present = internals.python_kernels()
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
        if where in seen and not _is_torchs(_recorded.kernels[where]):
            found = _recorded.kernels[where]
        elif where in new:
            found = _path_of_others(name, key)
        else:
            continue
        if found and is_of_torch(name):
            yield where, found


def _is_torchs(function: object) -> bool:
    if id(function) in _torchs:
        return True
    if any(map(is_foreign, (function, *_formulas_in(function, 0)))):
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


def foreign_fakes() -> Iterator[tuple[str, object]]:
    """Yield what others registered to be called in place of torch's operators during tracing.

    Yields:
        The operator, with what it is for, and the function.
    """
    for place, name, function in _fakes():
        if id(function) in _torchs:
            continue
        if not is_foreign(function):
            _torchs[id(function)] = function
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


# -- what the dispatcher says


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
    if defined[1].startswith(_for_others()):
        definition = internals.custom_operators.get().get(name)
        return definition is not None and origin_of(definition._init_fn).kind == "torch"
    built_in = internals.built_in()
    home = internals.torch_directory()
    return defined[1].startswith((home, built_in) if built_in else home)


def _path_of_others(name: str, key: str) -> str:
    """Return the file that registers a kernel, or "" if torch does.

    What registers for others is a file of torch's as well, which torch uses for no operator of
    ATen.
    """
    paths = [path for each, path in _registered_at(name) if each == key]
    if not paths:  # it was registered since
        _registered_at.cache_clear()
        paths = [path for each, path in _registered_at(name) if each == key]
    home = internals.torch_directory()
    for_others = _for_others() if name.startswith("aten::") else ()
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


@functools.cache
def _for_others() -> tuple[str, ...]:
    home = internals.torch_directory()
    return os.path.join(home, "library.py"), os.path.join(home, "_library") + os.sep
