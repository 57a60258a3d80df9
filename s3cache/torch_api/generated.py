"""Rebuild a graph without what torch imports only in case: Inductor's lowerings, a second of CPU.

Generated code names two things of those modules, and few graphs use them: each is found when it is
used. torch itself asks one of them whether a test wants to see the code.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from s3cache.torch_api.protocols import Function

R = TypeVar("R")

#: What imports Inductor's lowerings, and with them all else.
_LOWERING: Final = "torch._inductor.select_algorithm"
_PLANNING: Final = "torch._inductor.codegen.memory_planning"
#: Lines of generated code, and what they become.
_LINES: Final = {
    f"from {_LOWERING} import extern_kernels\n": "extern_kernels = _s3cache_kernels\n",
    f"from {_PLANNING} import _align as align\n": "align = _s3cache_align\n",
}
#: Kernels that are functions of torch's by the same name.
SAME_NAME: Final = frozenset({"mm", "addmm", "bmm", "baddbmm", "convolution", "_int_mm"})


def placed(code: types.CodeType, path: str) -> types.CodeType:
    """Return code, and what is inside of it, as that of another file."""
    if code.co_filename == path:
        return code
    constants = tuple(
        placed(each, path) if isinstance(each, types.CodeType) else each for each in code.co_consts
    )
    return code.replace(co_consts=constants, co_filename=path)


class LateKernels:
    """Stands for ``extern_kernels``; imports Inductor for what is not torch's by the same name."""

    def __getattr__(self, name: str) -> object:
        import torch

        if name in SAME_NAME and _LOWERING not in sys.modules:
            found: object = getattr(torch, name)
        else:
            found = getattr(importlib.import_module(_LOWERING).extern_kernels, name)
        vars(self)[name] = found
        return found


def late_align(nbytes: object) -> object:
    """Do what Inductor's own function does, which it imports with all else."""
    aligned: object = importlib.import_module(_PLANNING)._align(nbytes)
    return aligned


def light(source: str) -> tuple[str, dict[str, object]]:
    """Return generated code that imports less, and the names that it needs for that."""
    for line, shorter in _LINES.items():
        source = source.replace(line, shorter, 1)
    return source, {"_s3cache_kernels": LateKernels(), "_s3cache_align": late_align}


_GRAPH: Final = "torch._inductor.graph"
_STAND_IN: Final = "_s3cache_graph"


class _GraphLowering:
    """Stands for Inductor's class, which tests make show them the code of a graph."""

    save_output_code = None


def without_graph(function: Function[R]) -> Function[R]:
    """Return ``function``, which asks Inductor's class for graphs; not where it is not imported."""
    return function if _GRAPH in sys.modules else _without_graph(function)


@functools.cache
def _without_graph(function: Function[R]) -> Function[R]:
    if not isinstance(function, types.FunctionType) or "graph" not in function.__code__.co_names:
        return function
    module = types.ModuleType(f"torch._inductor.{_STAND_IN}")
    vars(module)["GraphLowering"] = _GraphLowering
    sys.modules[module.__name__] = module
    names = tuple(_STAND_IN if name == "graph" else name for name in function.__code__.co_names)
    code = function.__code__.replace(co_names=names)
    copy = types.FunctionType(code, function.__globals__, function.__name__)
    copy.__defaults__, copy.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return copy
