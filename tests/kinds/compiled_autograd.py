"""Cached graphs under compiled autograd, which traces the backward pass as a whole.

torch saves a training graph once its backward pass is compiled. Compiled autograd takes the
backward module instead, and compiles it as part of its own graph. So each program here first runs a
backward pass without it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from tests.kinds.case import Compile, case


def leaf() -> Any:
    return torch.arange(6.0).reshape(2, 3).requires_grad_()


def unchanged(function: Any) -> Any:
    return function


def capturing(compile_it: Compile, compiler: Any) -> AbstractContextManager[Any]:
    """Capture backward passes in the block, and compile them with ``compiler``; not for eager."""
    is_eager = compile_it(unchanged) is unchanged
    return nullcontext() if is_eager else torch._dynamo.compiled_autograd._enable(compiler)


def under_compiled_autograd(compile_it: Compile, loss: Any, compiler: Any = unchanged) -> None:
    with capturing(compile_it, compiler):
        loss.backward()


@case("compiled_autograd", shows=lambda runtime: runtime["has_backward_module"])
def backward_module_of_an_entry(compile_it: Compile) -> Any:
    """The module is traced, and runs without compilation."""
    function = compile_it(lambda x: x * x + 5)
    x, y = leaf(), leaf()
    first, second = function(x), function(y)
    first.sum().backward()
    under_compiled_autograd(compile_it, second.sum())
    return x, y, first, second, x.grad, y.grad


@case("compiled_autograd", shows=lambda runtime: runtime["num_symints_saved_for_bw"] > 0, slow=True)
def backward_module_with_symbols(compile_it: Compile) -> Any:
    function = compile_it(lambda x: x.sum(0).expand(x.shape[0], -1) * x.shape[0], dynamic=True)
    found = []
    for rows in (4, 6):
        x = torch.ones(rows, 3, requires_grad=True)
        function(x).sum().backward()
        x.grad = None
        out = function(x)
        under_compiled_autograd(compile_it, out.sum())
        found.append((x, x.grad, out))
    return found


@case("compiled_autograd", graphs=2, since=(2, 13), slow=True)
def hooks_in_its_graph(compile_it: Compile) -> Any:
    """Hooks that Dynamo traces become part of the graph of the backward pass."""
    function = compile_it(lambda x: x * x - 10)
    function(leaf()).sum().backward()
    return _hooked(function, lambda loss: under_compiled_autograd(compile_it, loss, compile_it))


def _hooked(function: Any, backward: Any) -> Any:
    order: list[str] = []

    def scale(name: str, factor: float) -> Any:
        def hook(grad: Any) -> Any:
            order.append(name)
            return grad * factor

        return hook

    def pre(grads: Any) -> Any:
        order.append("pre")
        return tuple(each * 2 for each in grads)

    def post(grads_in: Any, grads_out: Any) -> None:
        order.append("post")

    def accumulated(leaf: Any) -> None:
        order.append("accumulated")
        leaf.grad.add_(1)

    x = leaf()
    x.register_hook(scale("leaf", 3))
    x.register_post_accumulate_grad_hook(accumulated)
    out = function(x)
    out.register_hook(scale("output", 5))
    out.grad_fn.register_prehook(pre)
    out.grad_fn.register_hook(post)
    backward(out.sum())
    return x, out, x.grad, order
