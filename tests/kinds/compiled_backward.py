"""What compiled autograd captures, each inside of the graph that is then cached."""

from __future__ import annotations

from typing import Any

from tests.kinds.case import Compile, case
from tests.kinds.compiled_autograd import as_it_is, leaf, under_compiled_autograd


def _captured(compile_it: Compile, loss: Any) -> None:
    """Go backward, with what is captured compiled."""
    under_compiled_autograd(compile_it, loss, compile_it)


# -- forwards that never went backward without it


@case("compiled_backward", unsaved=1, halves=1, since=(2, 13), dense=True)
def no_backward_before(compile_it: Compile) -> Any:
    """The forward has no entry of its own: it is shared at the second level."""
    x = leaf()
    out = compile_it(lambda x: x * x + 51)(x)
    _captured(compile_it, out.sum())
    return x, out, x.grad


@case("compiled_backward", unsaved=1, halves=1, since=(2, 13), dense=True)
def all_of_it_inside(compile_it: Compile) -> Any:
    """Forward and backward in the context, from the first step."""
    import torch

    function = compile_it(lambda x: x.sin() * 52)
    found = []
    for _ in range(2):
        x = leaf()
        if compile_it(as_it_is) is as_it_is:
            out = function(x)
            out.sum().backward()
        else:
            with torch._dynamo.compiled_autograd._enable(compile_it):
                out = function(x)
                out.sum().backward()
        found.append((x, out, x.grad))
    return found


@case("compiled_backward", graphs=2, again=1, since=(2, 13))
def saved_outside_and_hit_inside(compile_it: Compile) -> Any:
    """A forward has one key, in the context and outside of it."""
    import torch

    function = lambda x: x.cos() * 53  # noqa: E731
    before = leaf()
    compile_it(function)(before).sum().backward()
    if compile_it(as_it_is) is not as_it_is:
        torch._dynamo.reset()
    x = leaf()
    if compile_it(as_it_is) is as_it_is:
        out = function(x)
        out.sum().backward()
    else:
        with torch._dynamo.compiled_autograd._enable(compile_it):
            out = compile_it(function)(x)
            out.sum().backward()
    return before, before.grad, x, out, x.grad


# -- nodes of the captured graph


@case("compiled_backward", since=(2, 13), dense=True)
def copy_slices(compile_it: Compile) -> Any:
    """A view that was written to: its base takes the gradient apart."""
    x = leaf()
    base = x * 1
    base[0].mul_(54)
    base[:, 1].add_(x[:, 0])
    _captured(compile_it, (base * base).sum())
    return x, base, x.grad


@case("compiled_backward", since=(2, 13), dense=True)
def unpack_hooks(compile_it: Compile) -> Any:
    import torch

    x = leaf()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x * 2, lambda x: x / 2 + 55):
        out = (x * x).exp().sum()
    _captured(compile_it, out)
    return x, out, x.grad


@case("compiled_backward", since=(2, 13), dense=True)
def scalars(compile_it: Compile) -> Any:
    """Numbers that nodes have saved."""
    import torch

    x = leaf()
    _captured(compile_it, torch.nn.functional.leaky_relu(x - 56, 0.25).sum())
    return x, x.grad


@case("compiled_backward", graphs=2, since=(2, 13), dense=True)
def size_guards(compile_it: Compile) -> Any:
    """Sizes that change from one backward pass to the next."""
    import torch

    found = []
    for size in (3, 5, 8):
        x = torch.arange(float(size)).requires_grad_()
        _captured(compile_it, (x.expand(2, size) * 57).sum(0).square().sum())
        found.append((x, x.grad))
    return found


@case("compiled_backward", since=(2, 13), dense=True)
def custom_function(compile_it: Compile) -> Any:
    """Dynamo traces its backward as it does any Python."""
    import torch

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            (x,) = ctx.saved_tensors
            return grad * x * 58

    x = leaf()
    out = Scale.apply(x)
    _captured(compile_it, out.sum())
    return x, out, x.grad


@case("compiled_backward", since=(2, 13), dense=True)
def nested_contexts(compile_it: Compile) -> Any:
    """What one of them has captured, the others have."""
    import torch

    x, y, z = leaf(), leaf(), leaf()
    outer, inner, after = ((each * each * 59).sum() for each in (x, y, z))
    if compile_it(as_it_is) is as_it_is:
        for loss in (outer, inner, after):
            loss.backward()
        return x.grad, y.grad, z.grad
    enable = torch._dynamo.compiled_autograd._enable
    with enable(compile_it):
        outer.backward()
        with enable(lambda gm: compile_it(gm, dynamic=True)):
            inner.backward()
        after.backward()
    return x.grad, y.grad, z.grad


@case("compiled_backward", again=1, since=(2, 13), dense=True)
def reset_between(compile_it: Compile) -> Any:
    """After a reset the same pass is captured anew, and looked up."""
    import torch

    found = []
    for _ in range(2):
        x = leaf()
        _captured(compile_it, (x.tanh() * 60).sum())
        found.append((x, x.grad))
        if compile_it(as_it_is) is not as_it_is:
            torch._dynamo.reset()
            torch._dynamo.compiled_autograd.reset()
    return found


@case("compiled_backward", since=(2, 13), dense=True)
def accumulated_gradients(compile_it: Compile) -> Any:
    """A leaf that has a gradient already, and one that is used twice."""
    x = leaf()
    (x * 61).sum().backward()
    _captured(compile_it, (x * x + x.sin()).sum())
    return x, x.grad
