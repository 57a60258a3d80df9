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

__all__ = ["OPERATORS", "Calling", "backend", "backends", "called", "multiplied"]

_aten = torch.ops.aten
OPERATORS = ["sin", "cos", "exp", "tanh", "abs", "sigmoid", "erf", "floor"]


def multiplied(graph: Any, name: str, by: float) -> Any:
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


def called(name: str, x: Tensor) -> Any:
    """A program with that operator in it."""
    return getattr(torch, name)(x) + 1


class Calling:
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
    for name, what in itertools.product(OPERATORS, _GIVEN):
        yield (
            f"{what} and {name}",
            functools.partial(called, name),
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


def _inner(name: str, by: float) -> dict[str, Any]:
    def inner_compile(gm: Any, inputs: Any, **kwargs: Any) -> Any:
        return compile_fx_inner(multiplied(gm, name, by), inputs, **kwargs)

    return {"inner_compile": inner_compile}


def _inner_partial(name: str, by: float) -> dict[str, Any]:
    return {"inner_compile": functools.partial(_compile_times, name, by)}


def _compile_times(name: str, by: float, gm: Any, inputs: Any, **kwargs: Any) -> Any:
    return compile_fx_inner(multiplied(gm, name, by), inputs, **kwargs)


def _inner_object(name: str, by: float) -> dict[str, Any]:
    return {"inner_compile": Calling(_inner(name, by)["inner_compile"])}


def _autograd(name: str, by: float) -> dict[str, Any]:
    def lower(gm: Any, inputs: Any) -> Any:
        multiplied(gm, name, by)
        return compile_fx_inner(gm, inputs, is_backward=False, is_inference=True, graph_id=0)

    compiler = SerializableAOTDispatchCompiler(OutputCode, lower)
    given = {"fw_compiler": compiler, "bw_compiler": compiler, "inference_compiler": compiler}
    return {"autograd": aot_autograd(**given)}


_GIVEN: dict[str, Callable[[str, float], dict[str, Any]]] = {
    "decompositions": _decompositions,
    "an inner compiler": _inner,
    "a partial inner compiler": _inner_partial,
    "an inner compiler that is an object": _inner_object,
    "compilers for AOTAutograd": _autograd,
}
