"""Effects of the runtime around a compiled graph, and what models of users do."""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

from tests.equal.cases import case, graph, matrix, train
from tests.equal.kinds.autograd import capturing
from tests.equal.programs import Compile, eagerly

# -- the runtime


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

    with torch._functorch.config.patch(donated_buffer=True):
        x, w = torch.ones(3, 3, requires_grad=True), torch.eye(3).requires_grad_()
        return train(compile_it(lambda x, w: (x @ w).relu() @ w), x, w)


_STATE = {"bypassed": 1, "reasons": ("backward-state", "function"), "graphs": 0, "halves": 1}


@case("runtime", **_STATE, slow=True)
def backward_state(compile_it: Compile) -> Any:
    """A hook on an intermediate becomes an input of the graph, which torch cannot put in a key."""

    def function(x: Any) -> Any:
        y = x * 2
        y.register_hook(lambda grad: grad * 3)
        return y + 1

    x = matrix(True)
    with capturing(compile_it, eagerly):
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
    before = os.dup(1)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 1)
        yield lines
        ctypes.CDLL(None).fflush(None)
        os.dup2(before, 1)
        file.seek(0)
        lines += file.read().split()
    os.close(before)


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


# -- models: hooks and state, eight bits; tests/frameworks/programs has more


class Counting(torch.nn.Module):
    """Keeps state in a buffer, in an attribute and in a plain list."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros(1))
        self.scale, self.seen = 2, [0.5]

    def forward(self, x: Any) -> Any:
        self.calls += 1
        self.scale = 3 - self.scale
        return self.linear(x) * self.scale + self.seen[0]


def _model() -> Counting:
    torch.manual_seed(0)
    return Counting()


@case("models", graphs=3, slow=True)
def hooks_and_state_of_modules(compile_it: Compile) -> Any:
    """Hooks of every kind, a parametrization, and state that changes with each call."""
    model = _model()
    torch.nn.utils.parametrizations.orthogonal(model.linear)
    model.register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    model.linear.register_forward_hook(lambda _, args, out: out * args[0].mean())
    model.register_state_dict_pre_hook(lambda *_: None)
    function, found = compile_it(model), []
    for _ in range(3):
        found.append(train(function, matrix(True)))
    return found, {name: value.clone() for name, value in model.state_dict().items()}


@graph(
    "models",
    matrix,
    lambda: torch.arange(9.0).reshape(3, 3).to(torch.float8_e4m3fn),
    lambda: torch.tensor(0.25),
)
def eight_bits(x: Any, weight: Any, scale: Any) -> Any:
    """A linear layer with weights and activations in float8."""
    low, high = torch.finfo(torch.float8_e4m3fn).min, torch.finfo(torch.float8_e4m3fn).max
    quantized = (x / scale).clamp(low, high).to(torch.float8_e4m3fn)
    return quantized.to(x.dtype) * scale @ weight.to(x.dtype).t()
