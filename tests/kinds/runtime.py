"""Effects of the runtime around a compiled graph."""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

from tests.kinds.case import Compile, case, matrix, train
from tests.kinds.compiled_autograd import capturing, unchanged


@case("runtime", slow=True)
def saved_tensor_changed_before_the_backward_pass(compile_it: Compile) -> Any:
    """Autograd must raise an error."""

    function = compile_it(lambda x, w: x * w)
    x, w = matrix(True), matrix() + 1
    function(x, w).sum().backward()
    out = function(x, w)
    w.add_(1)
    try:
        out.sum().backward()
    except RuntimeError as exc:
        return "modified by an inplace operation" in str(exc)
    return "not noticed"


@case("runtime", shows=lambda runtime: bool(runtime["bw_donated_idxs"]), slow=True)
def donated_buffers(compile_it: Compile) -> Any:
    """The backward pass reuses buffers that only it needs."""

    def function(x: Any, w: Any) -> Any:
        return torch.nn.functional.relu(x @ w) @ w

    with torch._functorch.config.patch(donated_buffer=True):
        x, w = torch.ones(3, 3, requires_grad=True), torch.eye(3).requires_grad_()
        return train(compile_it(function), x, w)


@case(
    "runtime",
    bypassed=1,
    reasons=("backward-state", "function"),
    graphs=0,
    halves=1,
    slow=True,
)
def backward_state(compile_it: Compile) -> Any:
    """A hook on an intermediate becomes an input of the graph, which torch cannot put in a key."""

    def hook(grad: Any) -> Any:
        return grad * 3

    def function(x: Any) -> Any:
        y = x * 2
        y.register_hook(hook)
        return y + 1

    x = matrix(True)
    with capturing(compile_it, unchanged):
        out = compile_it(function)(x)
        out.sum().backward()
    return x, x.grad, out


@case("runtime", slow=True)
def effect_tokens(compile_it: Compile) -> Any:
    """Effects happen in order: each passes a token to the next."""

    def function(x: Any) -> Any:
        torch.ops.aten._print("first")
        y = x + 1
        torch.ops.aten._print("second")
        return y

    function = compile_it(function)
    x = matrix()
    found = []
    with _printed() as printed:
        found += [function(x), function(x)]
    return x, found, printed


@contextlib.contextmanager
def _printed() -> Iterator[list[str]]:
    """Collect the words that any code of this process writes to its standard output."""
    lines: list[str] = []
    with tempfile.TemporaryFile("w+") as file:
        before = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            yield lines
        finally:
            ctypes.CDLL(None).fflush(None)
            os.dup2(before, 1)
            os.close(before)
        file.seek(0)
        lines += file.read().split()


@case("runtime", graphs=2)
def random_numbers(compile_it: Compile) -> Any:
    """The same seed gives the same numbers as eager; two calls in a row give different ones."""

    def function(x: Any) -> Any:
        return torch.nn.functional.dropout(x, 0.5) + torch.rand(2, 3)

    with torch._inductor.config.patch(fallback_random=True):
        function = compile_it(function)
        torch.manual_seed(3)
        found = [train(function, torch.ones(2, 3, requires_grad=True)) for _ in range(2)]
        x = torch.ones(2, 3)
        return found, function(x), function(x)


@case("runtime", shows=lambda runtime: runtime["grad_enabled_mutation"] is not None, slow=True)
def grad_mode_left_changed(compile_it: Compile) -> Any:
    """The graph changes grad mode."""

    def function(x: Any) -> Any:
        torch.set_grad_enabled(False)
        return x + 2

    x = matrix()
    try:
        out = compile_it(function)(x)
        after = torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)
    return x, out, after
