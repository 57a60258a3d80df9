"""Things that a graph only mentions: annotations, names of torch's code, function contexts."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._functorch.config as functorch
from torch import Tensor

from tests.equal.changes.bases import two
from tests.equal.programs import Pair, Program

_COUNT = 12  # variants of each program


def changes() -> Iterator[Pair]:
    """Yield variants of each program, after variant 0."""
    for name, make in _THINGS.items():
        for variant in range(1, _COUNT):
            yield Pair(
                "user", str(variant), make(0), make(variant), by_key=True, filled=f"user {name}"
            )


def _plain(x: Tensor, y: Tensor) -> Tensor:
    return torch.tanh(x @ y) @ y


def _annotated(variant: int) -> Program:
    def program(x: Tensor, y: Tensor) -> Any:
        with torch.fx.traceback.annotate({"variant": variant}):
            z = x.sin()
        return z * y

    return two(program, 4, 4)


def _budget(variant: int) -> Program:
    """torch's key has neither the name of the solver nor that of the estimator."""
    names = ("dp", "greedy", "ilp", "dp_knapsack_sliding_hirschberg", "other")
    option = {"activation_memory_budget_solver": names[variant % len(names)]}
    estimator = ("flops", "profile", "testing")[variant // len(names)]
    patch = {**option, "activation_memory_budget_runtime_estimator": estimator}
    return two(_plain, 4, 4, context=functools.partial(functorch.patch, patch))


# Custom autograd functions: Dynamo puts both of their passes into the graph, or breaks the graph,
# for example if they read an attribute of their class.


class Now:
    """The variant, which the functions below read while they are traced."""

    variant = 0


def _applied(function: type[torch.autograd.Function], variant: int) -> Program:
    @contextlib.contextmanager
    def changed() -> Iterator[None]:
        Now.variant = variant
        yield

    def program(x: Tensor, y: Tensor) -> Any:
        return function.apply(x, y)

    return two(program, 4, 4, context=changed, options={"fullgraph": True})


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * (1.0 + Now.variant), None


class Marked(torch.autograd.Function):
    """Each bit of the variant changes the context, which is in neither graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        first, second = x * y, x + y
        if Now.variant & 1:
            ctx.mark_non_differentiable(second)
        if Now.variant & 2:
            ctx.save_for_backward(x, y)
        else:
            ctx.x, ctx.y = x, y
        if Now.variant & 4:
            ctx.set_materialize_grads(False)
        return (second, first) if Now.variant & 8 else (first, second)

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[Tensor, Any]:
        x, y = ctx.saved_tensors if Now.variant & 2 else (ctx.x, ctx.y)
        return first * y + x, None


_THINGS: dict[str, Callable[[int], Program]] = {
    "annotation": _annotated,
    "names of the memory budget": _budget,
    "autograd function": functools.partial(_applied, Scaled),
    "context of an autograd function": functools.partial(_applied, Marked),
}
