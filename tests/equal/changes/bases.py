"""The base programs: small, and each with a feature that the key must include."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn

from tests.equal.programs import Program, once


def pointwise(x: Tensor, y: Tensor) -> Tensor:
    return torch.sin(x) * y + x


def normed(x: Tensor, y: Tensor) -> Tensor:
    """With torch's own key this hits across CPU capabilities, with other numbers."""
    return F.layer_norm(F.gelu(x), (x.shape[-1],)) * y


def inplace(x: Tensor, y: Tensor) -> Tensor:
    x.mul_(2)
    return x + y


def leafwise(x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        x.mul_(2)
    return x.sin() * y


def views(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x.t(), (x + y)[1:]


def made(x: Tensor, y: Tensor) -> Tensor:
    return torch.zeros(4) + torch.full((4,), 2.0) + x.sum() * y.sum() + torch.arange(4)


def attention(x: Tensor, y: Tensor) -> Tensor:
    q = x.reshape(1, 2, 2, -1)
    return F.scaled_dot_product_attention(q, q, q) * y.sum()


class Mlp(nn.Module):
    scale = 1.5

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x))) * self.scale


def two(function: Callable[..., Any], *shape: int, grad: bool = True, **how: Any) -> Program:
    """Return a program of two tensors; the first is a leaf that requires a gradient by default."""
    size = shape or (4, 8)
    return once(
        function, lambda: (torch.randn(size).requires_grad_(grad), torch.randn(size)), **how
    )


def mlp(module: Callable[[], Mlp] = Mlp) -> Program:
    return once(module, lambda: (torch.randn(4, 8),), makes_module=True)


BASES: dict[str, Program] = {
    "pointwise": two(pointwise),
    "normed": two(normed),
    "inplace": two(inplace, grad=False),
    "leafwise": two(leafwise),
    "views": two(views),
    "made": two(made),
    "attention": two(attention),
    "mlp": mlp(),
    "dynamic": two(pointwise, options={"dynamic": True}),
}
