"""Which Python functions were registered with torch's dispatcher, as far as we were there.

The dispatcher keeps them where nobody can read them; it only tells the file of the ``Library``, and
which keys an operator has kernels for.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import NamedTuple

import _s3cache_autoload
from s3cache.graph._homes import home_of
from s3cache.graph._whose import is_foreign
from s3cache.torch_api import internals

__all__ = [
    "forget_kernels",
    "is_native",
    "is_of_torch",
    "kernel_of",
    "record_kernel",
    "replaced_kernels",
]

_kernels: dict[str, _Recorded] = {}
_replaced: tuple[object, dict[str, object | None]] | None = None
_torchs: dict[int, object] = {}  # functions that are torch's, by id, and kept
_times_recorded = 0
_is_unwatched = False  # now or at some time before, so what ``import torch`` left may be replaced
_NATIVE = (".c", ".cc", ".cpp", ".cu", ".cuh", ".cxx", ".h", ".hpp", ".mm")


class _Recorded(NamedTuple):
    function: object
    by_torch: bool  # for nobody else


def record_kernel(where: str, function: object, *, by_torch: bool) -> None:
    """``function`` is registered from now on.

    Args:
        where: operator and key, as torch has them.
        by_torch: whether torch does so, for nobody else.
    """
    global _times_recorded
    _kernels[where] = _Recorded(function, by_torch)
    _times_recorded += 1


def forget_kernels() -> None:
    """Nobody records any more what is registered: what is known may be replaced unseen."""
    global _replaced, _is_unwatched
    _kernels.clear()
    _registered_at.cache_clear()
    _replaced = None
    _is_unwatched = True


def kernel_of(operator: str, key: str) -> object | None:
    """What was registered for an operator's qualified name and a dispatch key, if we saw it."""
    found = _kernels.get(f"{operator.replace('::', '/')}/{key.partition('[')[0]}")
    return None if found is None else found.function


def is_native(path: str) -> bool:
    """Whether what is registered from ``path`` was compiled: Python comes from any other name."""
    return path.endswith(_NATIVE)


def replaced_kernels() -> dict[str, object | None]:
    """Kernels in Python that others registered for torch's own operators.

    By operator and key, as torch has them; ``None`` stands for one that nobody saw.
    """
    global _replaced
    present = internals.python_kernels()
    new = set(present) if _is_unwatched else present - _s3cache_autoload.kernels
    seen = present & _kernels.keys()
    state = _times_recorded, seen, new
    if _replaced is None or _replaced[0] != state:
        _replaced = state, dict(_find_replaced(seen, new - seen))
    return _replaced[1]


def _find_replaced(seen: set[str], unseen: set[str]) -> Iterator[tuple[str, object | None]]:
    for where in sorted(seen):
        function, by_torch = _kernels[where]
        if by_torch and _is_torchs(function):
            continue
        if is_of_torch(_named(where)[0]):
            yield where, function
    for where in unseen:
        if _is_users(where) and is_of_torch(_named(where)[0]):
            yield where, None


def _is_torchs(function: object) -> bool:
    """Asked of hundreds, mostly of the same as at the last look."""
    if id(function) in _torchs:
        return True
    if is_foreign(function, ""):
        return False
    _torchs[id(function)] = function
    return True


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
        return definition is not None and home_of(definition._init_fn).kind == "torch"
    built_in = internals.built_in()
    home = internals.torch_directory()
    return defined[1].startswith((home, built_in) if built_in else home)


def _named(where: str) -> tuple[str, str]:
    """Operator and key of a kernel."""
    name, _, key = where.rpartition("/")
    return name.replace("/", "::", 1), key


def _is_users(where: str) -> bool:
    """Whether a kernel that nobody saw may be registered by others than torch.

    What registers for others is torch's own file as well, which torch uses for no operator of ATen.
    """
    name, key = _named(where)
    paths = [path for each, path in _registered_at(name) if each == key]
    if not paths:  # since it was asked for
        _registered_at.cache_clear()
        paths = [path for each, path in _registered_at(name) if each == key]
    home = internals.torch_directory()
    if not all(path.startswith(home) for path in paths):
        return True
    return name.startswith("aten::") and any(path.startswith(_for_others()) for path in paths)


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
