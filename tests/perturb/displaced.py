"""Operators in each other's place, and what is no operator: ``torch.ops.aten.sin = mine``.

The backward formula of an operator of the user's reaches them while a graph is traced, from where
torch keeps them: no graph shows it when its key is made.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["displaced"]

_aten = torch.ops.aten
_OPERATORS = ["sin", "cos", "exp", "tanh", "abs", "sigmoid", "erf", "floor", "neg", "relu"]
_HOWS = ("overload by another", "overload by a function", "packet by another", "packet by a class")

Altering = Callable[[float], Callable[[], contextlib.AbstractContextManager[Any]]]


def _operator(name: str) -> Any:
    """One whose backward formula asks ATen for its operator called so."""

    def forward(x: Tensor) -> Tensor:
        return x * 2

    def backward(_: Any, grad: Tensor) -> Any:
        return getattr(torch.ops.aten, name).default(grad)

    made = torch.library.custom_op(f"s3cache_displaced::{name}", forward, mutates_args=())
    made.register_fake(torch.empty_like)
    made.register_autograd(backward)
    return made


_REACHING = {name: _operator(name) for name in _OPERATORS}


def _program(name: str, x: Tensor) -> Tensor:
    made: Tensor = _REACHING[name](x)
    return made * x


def displaced() -> Iterator[tuple[str, Callable[[Tensor], Any], Altering]]:
    for name, how in itertools.product(_OPERATORS, _HOWS):
        make = functools.partial(functools.partial, _placed, name, how)
        yield f"{name}: {how}", functools.partial(_program, name), make


@contextlib.contextmanager
def _placed(name: str, how: str, by: float) -> Iterator[None]:
    def scaled(x: Tensor) -> Tensor:
        return torch.sinc(x) * by

    class Packet:
        default = staticmethod(scaled)

    packet = getattr(_aten, name)
    other = _aten.hardswish if by == 2 else _aten.mish
    owner, attribute, value = {
        "overload by another": (packet, "default", other.default),
        "overload by a function": (packet, "default", scaled),
        "packet by another": (_aten, name, other),
        "packet by a class": (_aten, name, Packet),
    }[how]
    old = getattr(owner, attribute)
    setattr(owner, attribute, value)
    try:
        yield
    finally:
        setattr(owner, attribute, old)
