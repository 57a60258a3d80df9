"""Functions and methods of the modules of torch that make code, in the place of which others stand.

Each member is made of words of a grammar: what is replaced × by what. Each exchanges operators of
the graph that passes by: what it does can be seen in the result.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._inductor.codegen.cpp
import torch._inductor.compile_fx
from torch import Tensor

__all__ = ["members", "native_members"]

Context = Callable[[], contextlib.AbstractContextManager[Any]]
Member = tuple[str, Callable[[Tensor], Any], Callable[[float], Context]]

_aten = torch.ops.aten
# By what a member that is told "by" puts there in place of sin.
_INSTEAD = {2.0: _aten.cos.default, 3.0: _aten.tanh.default}

# Functions that are given a graph, or a module with one, first.
_PASSES = [
    ("torch._inductor.compile_fx", "_recursive_joint_graph_passes"),
    ("torch._inductor.compile_fx", "_recursive_post_grad_passes"),
    ("torch._inductor.compile_fx", "joint_graph_passes"),
    ("torch._inductor.compile_fx", "post_grad_passes"),
    ("torch._inductor.compile_fx", "view_to_reshape"),
    ("torch._inductor.compile_fx", "record_original_output_strides"),
    ("torch._inductor.fx_passes.joint_graph", "canonicalize_aten_ir_passes"),
    ("torch._inductor.fx_passes.joint_graph", "constant_fold_uniform_value"),
    ("torch._inductor.fx_passes.post_grad", "remove_noop_ops"),
    ("torch._inductor.fx_passes.post_grad", "reorder_for_locality"),
    ("torch._inductor.fx_passes.post_grad", "_remove_profiler_ops"),
    ("torch._inductor.fx_passes.reinplace", "canonicalize_view_scatter_ops"),
]
# Methods, and functions, that are given an operator at some place among their arguments.
_CALLS = [
    ("torch._inductor.graph:GraphLowering", "call_function", 1),
    ("torch.fx.experimental.proxy_tensor", "proxy_call", 1),
    ("torch._subclasses.functional_tensor:FunctionalTensorMode", "__torch_dispatch__", 1),
]
_CODE = [
    ("torch._inductor.codegen.cpp:CppVecOverrides", "sin"),
    ("torch._inductor.codegen.cpp:CppVecOverrides", "exp"),
    ("torch._inductor.codegen.cpp:CppVecOverrides", "sqrt"),
]


def members() -> Iterator[Member]:
    """Name, program, and what puts something there that takes another operator."""
    for (place, name), how in itertools.product(_PASSES, ("plainly", "wrapping", "torch's", "lru")):
        yield f"{place}.{name} {how}", _program, _making(place, name, how, _in_graph)
    for (place, name), how in itertools.product(_PASSES[::2], ("partial", "object")):
        yield f"{place}.{name} {how}", _program, _making(place, name, how, _in_graph)
    for (place, name, at), how in itertools.product(_CALLS, ("plainly", "wrapping", "torch's")):
        change = functools.partial(_in_call, at)
        yield f"{place}.{name} {how}", _program, _making(place, name, how, change)


def native_members() -> Iterator[Member]:
    """The same of what writes C++."""
    for (place, name), how in itertools.product(_CODE, ("plainly", "wrapping", "class")):
        program = functools.partial(_called, name)
        yield f"{place}.{name} {how}", program, _making(place, name, how, _in_text)


def _program(x: Tensor) -> Any:
    return x.sin() + x.exp()


def _called(name: str, x: Tensor) -> Any:
    return getattr(x.abs(), name)() + 1


def _making(place: str, name: str, how: str, change: Any) -> Callable[[float], Context]:
    return lambda by: functools.partial(_replaced, place, name, how, change, by)


# -- what is done with what passes by


def _in_graph(original: Any, by: float, first: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(first, *args, **kwargs)
    graph = getattr(first, "graph", first)
    for node in graph.nodes:
        if node.target is _aten.sin.default:
            node.target = _INSTEAD[by]
    if graph is not first:
        first.recompile()
    return result


def _in_call(at: int, original: Any, by: float, *args: Any, **kwargs: Any) -> Any:
    if args[at] is _aten.sin.default:
        args = (*args[:at], _INSTEAD[by], *args[at + 1 :])
    return original(*args, **kwargs)


def _in_text(original: Any, by: float, x: Any) -> Any:
    text = original(x)
    return type(text)(f"({text} + {text})") if by > 2 else text


# -- what stands there


@contextlib.contextmanager
def _replaced(place: str, name: str, how: str, change: Any, by: float) -> Iterator[None]:
    module, _, kind = place.partition(":")
    owner: Any = getattr(sys.modules[module], kind) if kind else sys.modules[module]
    there: Any = inspect.getattr_static(owner, name)
    is_static = isinstance(there, staticmethod)
    new = _HOWS[how](there.__func__ if is_static else there, change, by)
    if how == "class":
        owner, name, there = sys.modules[module], kind, owner
        new = type(kind, (there,), {vars(new)["name"]: staticmethod(new)})
    elif is_static:
        new = staticmethod(new)
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, there)


def _plainly(original: Any, change: Any, by: float) -> Any:
    return lambda *args, **kwargs: change(original, by, *args, **kwargs)


def _wrapping(original: Any, change: Any, by: float) -> Any:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return change(original, by, *args, **kwargs)

    return wrapper


class _Callable:
    def __init__(self, original: Any, change: Any, by: float) -> None:
        self.original, self.change, self.by = original, change, by

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.change(self.original, self.by, *args, **kwargs)


def _for_class(original: Any, change: Any, by: float) -> Any:
    made = _wrapping(original, change, by)
    made.name = original.__name__
    return made


_HOWS: dict[str, Callable[[Any, Any, float], Any]] = {
    "plainly": _plainly,
    "wrapping": _wrapping,
    "torch's": lambda *given: torch.no_grad()(_plainly(*given)),
    "lru": lambda *given: functools.lru_cache(maxsize=None)(_plainly(*given)),
    "partial": lambda original, change, by: functools.partial(change, original, by),
    "object": _Callable,
    "class": _for_class,
}
