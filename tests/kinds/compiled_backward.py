"""Graphs that compiled autograd captures, and that are then cached."""

from __future__ import annotations

from typing import Any

import torch

from tests.kinds.case import Compile, case
from tests.kinds.compiled_autograd import capturing, leaf, unchanged, under_compiled_autograd

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
    if compile_it(unchanged) is not unchanged:
        torch._dynamo.reset()
    x = leaf()
    with capturing(compile_it, compile_it):
        out = compile_it(function)(x)
        out.sum().backward()
    return before, before.grad, x, out, x.grad


# -- nodes of the captured graph


@case("compiled_backward", graphs=2, since=(2, 13), slow=True)
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
