"""What models of users do: hooks and state, ensembles, gradients for each sample, eight bits."""

from __future__ import annotations

import copy
from typing import Any

import torch

from tests.kinds.case import Compile, case, matrix, train


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


@case("models", graphs=3)
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


@case("models", slow=True)
def gradients_for_each_sample(compile_it: Compile) -> Any:
    """``vmap`` over ``grad`` of a functional call."""
    model = torch.nn.Linear(3, 1)
    torch.manual_seed(0)
    parameters = {name: torch.randn_like(value) for name, value in model.named_parameters()}

    def loss(values: Any, sample: Any) -> Any:
        return torch.func.functional_call(model, values, (sample,)).square().sum()

    gradients = compile_it(torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0)))
    # Only in eager mode is one of them a view.
    return {name: each.clone() for name, each in gradients(parameters, matrix()).items()}


@case("models", slow=True)
def ensemble(compile_it: Compile) -> Any:
    """Several models with stacked parameters."""
    torch.manual_seed(0)
    models = [torch.nn.Linear(3, 2) for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")

    def one(parameters: Any, buffers: Any, x: Any) -> Any:
        return torch.func.functional_call(base, (parameters, buffers), (x,))

    run = compile_it(torch.func.vmap(one, in_dims=(0, 0, None)))
    return run({name: value.detach() for name, value in parameters.items()}, buffers, matrix())


@case("models", slow=True)
def jagged_attention(compile_it: Compile) -> Any:
    """Attention over sequences of different lengths, made from values and offsets."""

    def attend(values: Any, offsets: Any) -> Any:
        x = torch.nested.nested_tensor_from_jagged(values, offsets)
        heads = x.unflatten(-1, [2, 4]).transpose(1, 2)
        out = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
        return out.transpose(1, 2).values()

    values, offsets = torch.arange(48.0).reshape(6, 8) / 48, torch.tensor([0, 1, 4, 6])
    return compile_it(attend)(values, offsets)


@case("models", slow=True)
def eight_bits(compile_it: Compile) -> Any:
    """A linear layer with weights and activations in float8."""
    low, high = torch.finfo(torch.float8_e4m3fn).min, torch.finfo(torch.float8_e4m3fn).max

    def linear(x: Any, weight: Any, scale: Any) -> Any:
        quantized = (x / scale).clamp(low, high).to(torch.float8_e4m3fn)
        return quantized.to(x.dtype) * scale @ weight.to(x.dtype).t()

    weight = torch.arange(9.0).reshape(3, 3).to(torch.float8_e4m3fn)
    return compile_it(linear)(matrix(), weight, torch.tensor(0.25))
