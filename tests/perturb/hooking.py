"""Code of the user's that torch runs while it traces a graph, written with an expression in it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["HOOKS", "VALUES"]

#: The module in which a hook is defined.
VALUES = "s3cache_reaching_values"

_OPERATOR = "s3cache_reaching::op"


@dataclass(frozen=True)
class Hook:
    """One kind of code.

    Attributes:
        source: a module, with ``{reads}`` where the value is read.
        calls: the program that makes torch run it.
        shape: of its input.
        wraps: whether the program is given the tensor subclass ``Sub`` of the module.
    """

    source: str
    calls: Callable[..., Any]
    wraps: bool = False

    @contextlib.contextmanager
    def installed(self, names: dict[str, Any], reads: str) -> Iterator[None]:
        """Define it in a module with ``names``, and register it."""
        exec(_COMMON + self.source.format(reads=reads), names)
        forward = names["forward"]
        definition = torch.library.custom_op(_OPERATOR, forward, mutates_args=(), schema=_SCHEMA)
        definition.register_fake(names["fake"])
        definition.register_autograd(names["backward"], setup_context=names.get("setup_context"))
        if "vmap" in names:
            definition.register_vmap(names["vmap"])
        if "rule" in names:
            definition.register_torch_dispatch(names["Sub"], names["rule"])
        _Now.names = names
        try:
            yield
        finally:
            definition._lib._destroy()

    def make(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The program and its inputs."""
        x, y = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
        if self.wraps:
            return self.calls, (_Now.names["Sub"](x.detach()), y)
        return self.calls, (x, y)


class _Now:
    names: dict[str, Any] = {}  # noqa: RUF012 - of the hook that is installed


_SCHEMA = "(Tensor x) -> Tensor"
_COMMON = """
import torch
def forward(x): return x * 2
def fake(x): return torch.empty_like(x)
def backward(ctx, grad): return grad * 2
"""
_SUBCLASS = """
class Sub(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )
    def __init__(self, inner): self.inner = inner
    def __tensor_flatten__(self): return ["inner"], None
    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride): return Sub(inner["inner"])
    @classmethod
    def __torch_dispatch__(cls, func, kinds, args=(), kwargs=None):
        plain = [each.inner if isinstance(each, cls) else each for each in args]
        return {dispatch}
"""


def _operates(x: Tensor, y: Tensor) -> Any:
    return torch.ops.s3cache_reaching.op(x) * y


def _broadcasts(x: Tensor, y: Tensor) -> Any:
    return torch.ops.s3cache_reaching.op(x) * y[0]


def _vectorized(x: Tensor, y: Tensor) -> Any:
    return torch.vmap(torch.ops.s3cache_reaching.op)(x) * y


def _wrapped(x: Any, y: Tensor) -> Any:
    return x.sin().inner * y


def _ruled(x: Any, y: Tensor) -> Any:
    return torch.ops.s3cache_reaching.op(x).inner * y


HOOKS: dict[str, Hook] = {
    "backward": Hook("def backward(ctx, grad): return grad * {reads}", _operates),
    "setup": Hook(
        "def setup_context(ctx, inputs, output): ctx.by = {reads}\n"
        "def backward(ctx, grad): return grad * ctx.by",
        _operates,
    ),
    "fake": Hook(
        "def forward(x): return x.repeat({reads}, 1)\n"
        "def fake(x): return x.new_empty(x.shape[0] * {reads}, x.shape[1])\n"
        "def backward(ctx, grad): return grad[:4]",
        _broadcasts,
    ),
    "vmap": Hook("def vmap(info, in_dims, x): return x * {reads}, 0", _vectorized),
    "subclass": Hook(
        _SUBCLASS.replace("{dispatch}", "Sub(func(*plain, **(kwargs or {{}})) * {reads})"),
        _wrapped,
        wraps=True,
    ),
    "rule": Hook(
        _SUBCLASS.replace("{dispatch}", "Sub(func(*plain, **(kwargs or {{}})))")
        + "def rule(mode, func, kinds, args=(), kwargs=None):\n"
        "    return Sub(args[0].inner * {reads})",
        _ruled,
        wraps=True,
    ),
}
