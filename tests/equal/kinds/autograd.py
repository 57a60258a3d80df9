"""Graphs under compiled autograd, which traces the backward pass as a whole.

torch saves a training graph once its backward pass is compiled. Compiled autograd takes the
backward module instead, and compiles it as part of its own graph. So the first programs here run a
backward pass without it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from tests.equal.cases import case
from tests.equal.programs import Compile, eagerly

# -- backward modules of cached graphs


def leaf() -> Any:
    return torch.arange(6.0).reshape(2, 3).requires_grad_()


def capturing(compile_it: Compile, compiler: Any) -> AbstractContextManager[Any]:
    """Capture backward passes in the block, and compile them with ``compiler``; not for eager."""
    return (
        nullcontext()
        if compile_it is eagerly
        else torch._dynamo.compiled_autograd._enable(compiler)
    )


def under_compiled_autograd(compile_it: Compile, loss: Any, compiler: Any = eagerly) -> None:
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

    def output(grad: Any) -> Any:
        order.append("output")
        return grad * 5

    def pre(grads: Any) -> Any:
        order.append("pre")
        return tuple(each * 2 for each in grads)

    def accumulated(leaf: Any) -> None:
        order.append("accumulated")
        leaf.grad.add_(1)

    x = leaf()
    x.register_hook(lambda grad: grad * 3)
    x.register_post_accumulate_grad_hook(accumulated)
    out = function(x)
    out.register_hook(output)
    out.grad_fn.register_prehook(pre)
    out.grad_fn.register_hook(lambda *_: order.append("post"))
    backward(out.sum())
    return x, out, x.grad, order


# -- graphs without a backward pass outside of compiled autograd


@case("compiled_backward", unsaved=1, halves=1, since=(2, 13), slow=True)
def all_of_it_inside(compile_it: Compile) -> Any:
    """Forward and backward run in the context from the first step."""
    function = compile_it(lambda x: x.sin() * 52)
    found = []
    for _ in range(2):
        x = leaf()
        with capturing(compile_it, compile_it):
            out = function(x)
            out.sum().backward()
        found.append((x, out, x.grad))
    return found


@case("compiled_backward", graphs=2, again=1, since=(2, 13))
def saved_outside_and_hit_inside(compile_it: Compile) -> Any:
    """A forward has the same key in the context and outside of it."""
    function = lambda x: x.cos() * 53  # noqa: E731
    before = leaf()
    compile_it(function)(before).sum().backward()
    if compile_it is not eagerly:
        torch._dynamo.reset()
    x = leaf()
    with capturing(compile_it, compile_it):
        out = compile_it(function)(x)
        out.sum().backward()
    return before, before.grad, x, out, x.grad


# -- nodes of the captured graph


@case("compiled_backward", graphs=2, native=True, since=(2, 13), slow=True)
def size_guards(compile_it: Compile) -> Any:
    """Sizes that change from one backward pass to the next."""
    found = []
    for size in (3, 5, 8):
        x = torch.arange(float(size)).requires_grad_()
        loss = (x.expand(2, size) * 57).sum(0).square().sum()
        under_compiled_autograd(compile_it, loss, compile_it)
        found.append((x, x.grad))
    return found


@case("compiled_backward", since=(2, 13), slow=True)
def nested_contexts(compile_it: Compile) -> Any:
    """Nested contexts share their captured graphs."""
    x, y, z = leaf(), leaf(), leaf()
    outer, inner, after = ((each * each * 59).sum() for each in (x, y, z))
    with capturing(compile_it, compile_it):
        outer.backward()
        with capturing(compile_it, lambda gm: compile_it(gm, dynamic=True)):
            inner.backward()
        after.backward()
    return x.grad, y.grad, z.grad
