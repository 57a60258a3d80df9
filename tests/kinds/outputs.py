"""What a graph may return."""

from __future__ import annotations

from typing import Any

from tests.kinds.case import Compile, case, train


def _has(kind: str) -> Any:
    return lambda runtime: any(each["output_type"] == kind for each in runtime["outputs"])


def _matrix(requires_grad: bool = False) -> Any:
    import torch

    return torch.arange(12.0).reshape(4, 3).requires_grad_(requires_grad)


@case("outputs", shows=_has("non_alias"), dense=True)
def non_alias(compile_it: Compile) -> Any:
    def function(x: Any) -> Any:
        return x + 1, x.t() + 1, x.shape[0]

    x = _matrix()
    return x, compile_it(function)(x)


@case("outputs", shows=lambda runtime: runtime["has_backward"], dense=True)
def non_alias_training(compile_it: Compile) -> Any:
    return train(compile_it(lambda x: x * x), _matrix(True))


@case("outputs", shows=_has("alias_of_input"))
def alias_of_input(compile_it: Compile) -> Any:
    def function(x: Any) -> Any:
        return x.view(-1), x.t()[1:], x + 1

    x = _matrix()
    return x, compile_it(function)(x)


@case("outputs", shows=_has("alias_of_input"), dense=True)
def alias_of_input_training(compile_it: Compile) -> Any:
    def function(x: Any) -> Any:
        return x.view(-1), x.t()[1:], x * x

    return train(compile_it(function), _matrix(True))


@case("outputs", shows=_has("alias_of_input"), dense=True)
def alias_of_input_mutated_by_the_caller(compile_it: Compile) -> Any:
    """The output must be a real view: writing to it reaches the input."""

    def function(x: Any) -> Any:
        return x[1:].t(), x + 1

    x = _matrix()
    view, other = compile_it(function)(x)
    view.mul_(10)
    return x, view, other


@case("outputs", shows=_has("is_input"), dense=True)
def is_input(compile_it: Compile) -> Any:
    def function(x: Any) -> Any:
        return x, x * 2, x

    x = _matrix()
    return x, compile_it(function, without_dynamo=True)(x)


@case("outputs", shows=_has("is_input"), dense=True)
def is_input_training(compile_it: Compile) -> Any:
    def function(x: Any, w: Any) -> Any:
        return x, w, x * w

    return train(compile_it(function, without_dynamo=True), _matrix(True), _matrix(True))


@case("outputs", shows=_has("alias_of_intermediate_save_as_output"), dense=True)
def alias_of_intermediate_save_as_output(compile_it: Compile) -> Any:
    """Two views of one intermediate: it is returned too, and the views are made of it."""

    def function(x: Any) -> Any:
        y = x * x
        return y.view(-1), y.t()

    return train(compile_it(function), _matrix(True))


@case("outputs", shows=_has("alias_of_intermediate"), dense=True)
def alias_of_intermediate(compile_it: Compile) -> Any:
    def function(x: Any) -> Any:
        y = x * x
        return y[0], y[1], y.t(), x + 1

    return train(compile_it(function), _matrix(True))


@case("outputs", shows=_has("alias_of_intermediate_base_is_user_output"), dense=True)
def alias_of_intermediate_base_is_user_output(compile_it: Compile) -> Any:
    def function(x: Any) -> Any:
        y = x * x
        return y.view(-1), y

    return train(compile_it(function), _matrix(True))


@case(
    "outputs",
    shows=_has("unsafe_view_alias"),
    differs=("[1][0].base", "[1][0].is_view"),
    dense=True,
)
def unsafe_view_alias(compile_it: Compile) -> Any:
    """A lone view of an intermediate that nobody else sees: as good as no view."""

    def function(x: Any) -> Any:
        return ((x * x).view(-1),)

    return train(compile_it(function), _matrix(True))


@case(
    "outputs",
    shows=_has("custom_function_view"),
    differs=("[1][0].base", "[1][0].is_view"),
    dense=True,
)
def custom_function_view(compile_it: Compile) -> Any:
    import torch

    class Flat(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.view(-1)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad.view(4, 3) * 3

    def function(x: Any) -> Any:
        return Flat.apply(x), x * 2

    return train(compile_it(function), _matrix(True))


@case("outputs", shows=lambda runtime: any(e["dynamic_dims"] for e in runtime["outputs"]))
def dynamic_dims(compile_it: Compile) -> Any:
    import torch

    def function(x: Any) -> Any:
        return x * 2, x.t(), x.shape[0] * 2

    function = compile_it(function, dynamic=True)
    return [train(function, torch.ones(rows, 3, requires_grad=True)) for rows in (4, 7)]


@case(
    "outputs",
    shows=lambda r: {e["requires_grad"] for e in r["outputs"]} == {True, False},
    dense=True,
)
def some_outputs_require_grad(compile_it: Compile) -> Any:
    import torch

    def function(x: Any) -> Any:
        with torch.no_grad():
            apart = x * 3
        return x * 2, x.detach() + 1, apart, x.argmax(), x.view(-1)

    return train(compile_it(function), _matrix(True))


@case("outputs", differs=("[2].is_leaf",), dense=True)
def view_under_no_grad(compile_it: Compile) -> Any:
    """Has no part in the backward pass."""
    import torch

    def function(x: Any) -> Any:
        y = x * 2
        with torch.no_grad():
            view = y.view(-1)
        return y, view

    x = _matrix(True)
    y, view = compile_it(function)(x)
    y.sum().backward()
    return x, y, view, x.grad


@case("outputs", dense=True)
def marked_non_differentiable(compile_it: Compile) -> Any:
    import torch

    class Split(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            index = x > 3
            ctx.mark_non_differentiable(index)
            return x * 2, index

        @staticmethod
        def backward(ctx: Any, grad: Any, _: Any) -> Any:
            return grad * 5

    return train(compile_it(lambda x: Split.apply(x)), _matrix(True))


@case("outputs", dense=True)
def strides_are_kept(compile_it: Compile) -> Any:
    import torch

    def function(x: Any) -> Any:
        return x * 2, torch.nn.functional.avg_pool2d(x, 2)

    x = torch.arange(64.0).reshape(2, 2, 4, 4).to(memory_format=torch.channels_last)
    return x, compile_it(function)(x)


@case("outputs", dense=True)
def nothing_computed(compile_it: Compile) -> Any:
    """Views and inputs only: the inner graph returns nothing of its own."""

    def function(x: Any) -> Any:
        return x.view(-1), None, [x.t()], {"rows": x.shape[0]}

    x = _matrix()
    return x, compile_it(function)(x)
