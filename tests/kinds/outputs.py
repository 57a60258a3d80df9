"""Graphs with different kinds of outputs."""

from __future__ import annotations

from typing import Any

import torch

from tests.kinds.case import Compile, case, matrix, train


def _has(kind: str) -> Any:
    return lambda runtime: any(each["output_type"] == kind for each in runtime["outputs"])


@case("outputs", shows=_has("alias_of_input"), slow=True)
def alias_of_input(compile_it: Compile) -> Any:
    def function(x: Any) -> Any:
        return x.view(-1), x.t()[1:], x + 1

    x = matrix(rows=4)
    return x, compile_it(function)(x)


def _trained(name: str, function: Any, **expected: Any) -> None:
    """Add a case of a training step of ``function``."""

    def program(compile_it: Compile) -> Any:
        return train(compile_it(function), matrix(True, rows=4))

    program.__name__ = name
    case("outputs", slow=True, **expected)(program)


def _two_views(x: Any) -> Any:
    """The graph also returns the intermediate, and views are made from it."""
    y = x * x
    return y.view(-1), y.t()


def _many_views(x: Any) -> Any:
    y = x * x
    return y[0], y[1], y.t(), x + 1


def _view_and_base(x: Any) -> Any:
    y = x * x
    return y.view(-1), y


def _lone_view(x: Any) -> Any:
    """The view counts as no view, because nothing else uses the intermediate."""
    return ((x * x).view(-1),)


_SAVED = "alias_of_intermediate_save_as_output"
_RETURNED = "alias_of_intermediate_base_is_user_output"
_NO_VIEW = ("[1][0].base", "[1][0].is_view")

_trained(_SAVED, _two_views, shows=_has(_SAVED))
_trained("alias_of_intermediate", _many_views, shows=_has("alias_of_intermediate"))
_trained(_RETURNED, _view_and_base, shows=_has(_RETURNED))
_trained("unsafe_view_alias", _lone_view, shows=_has("unsafe_view_alias"), differs=_NO_VIEW)


@case("outputs", shows=_has("custom_function_view"), differs=_NO_VIEW, slow=True)
def custom_function_view(compile_it: Compile) -> Any:
    class Flat(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.view(-1)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad.view(4, 3) * 3

    def function(x: Any) -> Any:
        return Flat.apply(x), x * 2

    return train(compile_it(function), matrix(True, rows=4))


@case("outputs", shows=lambda runtime: any(e["dynamic_dims"] for e in runtime["outputs"]))
def dynamic_dims(compile_it: Compile) -> Any:
    def function(x: Any) -> Any:
        return x * 2, x.t(), x.shape[0] * 2

    function = compile_it(function, dynamic=True)
    return [train(function, torch.ones(rows, 3, requires_grad=True)) for rows in (4, 7)]


@case(
    "outputs",
    shows=lambda r: {e["requires_grad"] for e in r["outputs"]} == {True, False},
    slow=True,
)
def some_outputs_require_grad(compile_it: Compile) -> Any:
    def function(x: Any) -> Any:
        with torch.no_grad():
            apart = x * 3
        return x * 2, x.detach() + 1, apart, x.argmax(), x.view(-1)

    return train(compile_it(function), matrix(True, rows=4))
