"""Graphs that change their inputs."""

from __future__ import annotations

from typing import Any

import torch

from tests.kinds.case import Compile, case, matrix, train


def _any(**wanted: Any) -> Any:
    """Return a check that some input is described with all of these values."""

    def shows(runtime: dict[str, Any]) -> bool:
        return any(wanted.items() <= each.items() for each in runtime["inputs"])

    return shows


@case("inputs", shows=_any(mutation_type="MUTATED_IN_GRAPH", mutates_data=True))
def data_mutated_in_graph(compile_it: Compile) -> Any:
    def function(x: Any, y: Any) -> Any:
        x.mul_(2)
        return x + y

    x, y = matrix(), matrix()
    return x, y, compile_it(function)(x, y)


@case(
    "inputs",
    shows=_any(mutation_type="MUTATED_OUT_GRAPH", mutates_data=True, is_leaf=False),
    slow=True,
)
def data_mutated_out_of_graph(compile_it: Compile) -> Any:
    """Autograd sees a change of a non-leaf: the caller's tensor gets a new history."""

    leaf = matrix(True)
    x = leaf * 2

    def function(x: Any) -> Any:
        x.mul_(3)
        return x + 1

    out = compile_it(function)(x)
    (out * 2 + x).sum().backward()
    return leaf, leaf.grad, x, out


@case("inputs", since=(2, 12), slow=True)
def storage_resized(compile_it: Compile) -> Any:
    """A parameter gets storage and values, as in FSDP."""

    def function(x: Any, full: Any) -> Any:
        x.untyped_storage().resize_(24)
        with torch.no_grad():
            x.copy_(full)
        return x * 2

    x, full = matrix(), matrix()
    x.untyped_storage().resize_(0)
    return x, full, compile_it(function)(x, full)


@case("inputs", shows=_any(mutates_storage_metadata=True), slow=True)
def storage_exchanged(compile_it: Compile) -> Any:
    def function(x: Any, y: Any) -> Any:
        with torch.no_grad():
            torch.ops.aten.set_.source_Tensor(x, y)
        return x * 2

    x, y = matrix(), matrix() + 1
    return x, y, compile_it(function)(x, y)


@case("inputs", shows=lambda runtime: "AOTSyntheticBaseWrapper" in runtime["wrappers"], slow=True)
def overlapping_and_mutated(compile_it: Compile) -> Any:
    """The graph writes to one of two views of a tensor; torch makes both from one base."""

    def function(x: Any, y: Any) -> Any:
        x.mul_(2)
        return x + y

    leaf = matrix(True)
    base = leaf * 1
    x, y = base.view(-1), base[1:]
    out = compile_it(lambda x, y: function(x, y.view(-1)[:1]))(x, y)
    out.sum().backward()
    return leaf, leaf.grad, base, x, y, out


@case(
    "inputs",
    shows=lambda runtime: bool(
        runtime["indices_of_inputs_that_requires_grad_with_mutations_in_bw"]
    ),
    slow=True,
)
def mutated_in_the_backward_pass(compile_it: Compile) -> Any:
    class Counting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, seen: Any) -> Any:
            ctx.seen = seen
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            with torch.no_grad():
                ctx.seen.add_(grad)
            return grad * 2, None

    function = compile_it(lambda x, seen: Counting.apply(x, seen))
    return train(function, matrix(True), matrix(True) * 0)
