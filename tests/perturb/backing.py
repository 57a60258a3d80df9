"""What programs give to Inductor and AOTAutograd to compile by, from backends of their own.

By all of it the result of an operator is multiplied by a number.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._inductor.decomposition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.output_code import OutputCode

__all__ = ["backend", "backends"]

_aten = torch.ops.aten
_OPERATORS = ["sin", "cos", "exp", "tanh", "abs", "sigmoid", "erf", "floor"]


def _multiplied(graph: Any, name: str, by: float) -> Any:
    """Have each result of the operator be another one."""
    targets = (getattr(torch, name), getattr(_aten, name).default)
    for node in list(getattr(graph, "graph", graph).nodes):
        if node.target in targets and not node.meta.get("s3cache_tests"):
            node.meta["s3cache_tests"] = True
            multiply = torch.mul if node.target is targets[0] else _aten.mul.Tensor
            with node.graph.inserting_after(node):
                product = node.graph.call_function(multiply, (node, by))
            product.meta = {**node.meta}
            node.replace_all_uses_with(product, lambda user, made=product: user is not made)
    if hasattr(graph, "recompile"):
        graph.recompile()
    return graph


def _called(name: str, x: Tensor) -> Any:
    """A program with that operator in it."""
    return getattr(torch, name)(x) + 1


class _Calling:
    """A function, as an object."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


# -- backends of the user's


class _Now:
    """What the backend gives to the compiler, while it is set."""

    given: dict[str, Any] = {}  # noqa: RUF012 - of the one that compiles


def backend(gm: Any, inputs: Any) -> Any:
    """As programs write one."""
    if "autograd" in _Now.given:
        return _Now.given["autograd"](gm, inputs)
    return compile_fx(gm, inputs, **_Now.given)


def backends() -> Iterator[tuple[str, Callable[[Tensor], Any], Any]]:
    """Name, program for :func:`backend`, and what has that give something to the compiler."""
    for name, what in itertools.product(_OPERATORS, _GIVEN):
        yield (
            f"{what} and {name}",
            functools.partial(_called, name),
            functools.partial(_giving, what, name),
        )


def _giving(what: str, name: str, by: float) -> Any:
    @contextlib.contextmanager
    def altered() -> Iterator[None]:
        before, _Now.given = _Now.given, _GIVEN[what](name, by)
        try:
            yield
        finally:
            _Now.given = before

    return altered


def _decompositions(name: str, by: float) -> dict[str, Any]:
    usual = torch._inductor.decomposition.select_decomp_table()
    return {"decompositions": {**usual, getattr(_aten, name).default: lambda x: x * by}}


def _compile_times(name: str, by: float, gm: Any, inputs: Any, **kwargs: Any) -> Any:
    return compile_fx_inner(_multiplied(gm, name, by), inputs, **kwargs)


def _inner(kind: Callable[[Any], Any], name: str, by: float) -> dict[str, Any]:
    return {"inner_compile": kind(functools.partial(_compile_times, name, by))}


def _plain(function: Any) -> Any:
    return lambda *args, **kwargs: function(*args, **kwargs)


def _autograd(name: str, by: float) -> dict[str, Any]:
    def lower(gm: Any, inputs: Any) -> Any:
        _multiplied(gm, name, by)
        return compile_fx_inner(gm, inputs, is_backward=False, is_inference=True, graph_id=0)

    compiler = SerializableAOTDispatchCompiler(OutputCode, lower)
    given = {"fw_compiler": compiler, "bw_compiler": compiler, "inference_compiler": compiler}
    return {"autograd": aot_autograd(**given)}


_GIVEN: dict[str, Callable[[str, float], dict[str, Any]]] = {
    "decompositions": _decompositions,
    "an inner compiler": functools.partial(_inner, _plain),
    "a partial inner compiler": functools.partial(_inner, functools.partial),
    "an inner compiler that is an object": functools.partial(_inner, _Calling),
    "compilers for AOTAutograd": _autograd,
}
