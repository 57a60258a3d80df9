"""Graphs that are compiled ahead of time, or by themselves: what serving engines do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._library.opaque_object import register_opaque_type
from torch._opaque_base import OpaqueBase

from tests.equal.cases import case, matrix
from tests.equal.programs import Compile


class Name(OpaqueBase):
    """The name of a layer, which is an input of a graph: all layers then share one graph."""

    def __init__(self, value: str) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Name) and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        return f"Name({self.value!r})", {"Name": Name}


@functools.cache
def _define_operator() -> None:
    """Define an operator with a Python fake, which takes a layer's name."""
    register_opaque_type(Name, typ="value", hoist=True)

    @torch.library.custom_op("s3cache_ahead::scaled", mutates_args=())
    def scaled(x: torch.Tensor, name: Name) -> torch.Tensor:
        return x * len(name.value)

    @scaled.register_fake
    def _(x: torch.Tensor, _: Name) -> torch.Tensor:
        return torch.empty_like(x)


def _plain(x: Any) -> Any:
    return x.sin() @ x.t()


def _named(x: Any) -> Any:
    scaled = torch.ops.s3cache_ahead.scaled
    return scaled(x.sin(), Name("layers.0")) + scaled(x, Name("layers.10"))


def _ahead(compile_it: Compile, function: Callable[..., Any], x: Any) -> Any:
    """Return what the function returns, compiled ahead of time."""
    compiled = compile_it(function, fullgraph=True)
    if compiled is function:
        return function(x)
    with torch._dynamo.config.patch(enable_aot_compile=True):  # the default since torch 2.12
        return compiled.aot_compile(((x,), {}))(x)


def _alone(compile_it: Compile, function: Callable[..., Any], x: Any, **options: Any) -> Any:
    """Return the same, compiled by Inductor alone from the graph that Dynamo traced."""
    if compile_it(function) is function:
        return function(x)
    graphs = []

    def keep(gm: Any, _: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    compile_it(function, backend=keep, fullgraph=True)(x)
    inputs = [each.meta["example_value"] for each in graphs[0].graph.find_nodes(op="placeholder")]
    inductor: Any = torch._inductor
    compiled = inductor.standalone_compile(
        graphs[0], inputs, dynamic_shapes="from_graph", options={}, **options
    )
    return compiled(*(x if isinstance(each, torch.Tensor) else each.real_obj for each in inputs))[0]


@case("ahead")
def ahead_of_time(compile_it: Compile) -> Any:
    x = matrix()
    return x, _ahead(compile_it, _plain, x)


@case("ahead", graphs=0, bypassed=1, reasons=("component", "custom-operator"), halves=1)
def ahead_of_time_with_a_custom_operator(compile_it: Compile) -> Any:
    """A refusal does not end the second level, where torch bundles artifacts."""
    _define_operator()
    x = matrix()
    return x, _ahead(compile_it, _named, x)


@case("ahead", slow=True)
def alone(compile_it: Compile) -> Any:
    x = matrix()
    return x, _alone(compile_it, _plain, x)


@case("ahead", slow=True)
def alone_and_bundled(compile_it: Compile) -> Any:
    x = matrix()
    return x, _alone(compile_it, _plain, x, aot=True)


@case("ahead", graphs=0, bypassed=1, reasons=("component", "custom-operator"), halves=1, slow=True)
def alone_and_bundled_with_a_custom_operator(compile_it: Compile) -> Any:
    _define_operator()
    x = matrix()
    return x, _alone(compile_it, _named, x, aot=True)
