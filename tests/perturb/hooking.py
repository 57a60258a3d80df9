"""Code of the user's that torch runs while it traces a graph, written with an expression in it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch._functorch.config as functorch
import torch._inductor.config as inductor
import torch._inductor.decomposition
import torch._inductor.lowering
import torch.nn.functional as F  # noqa: N812 - as everybody does
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from s3cache.graph import forget_kernels, record_kernel

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
        around: registers what of the module is no part of an operator's definition.
    """

    source: str
    calls: Callable[..., Any]
    wraps: bool = False
    around: Callable[[Any], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

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
            with self.around(names.get("hook")):
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
    def __new__(cls, inner, by=None):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )
    def __init__(self, inner, by={by}): self.inner, self.by = inner, by
    def __tensor_flatten__(self): return ["inner"], self.by
    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Sub(inner["inner"]{unflattened}, context)
    @classmethod
    def __torch_dispatch__(cls, func, kinds, args=(), kwargs=None):
        plain = [each.inner if isinstance(each, cls) else each for each in args]
        return {dispatch}
"""

# Pickling says nothing of it, as it does of what keeps its state in a registry.
_CARRIED = """
class Carried:
    def read(self): return {reads}
    def __reduce__(self): return Carried, ()
    def __eq__(self, other): return isinstance(other, Carried)
    def __hash__(self): return 0
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


def _subclass(dispatch: str, unflattened: str = "", by: str = "None") -> str:
    changed = _SUBCLASS.replace("{dispatch}", dispatch).replace("{by}", by)
    return changed.replace("{unflattened}", unflattened)


def _raw(x: Tensor, y: Tensor) -> Any:
    return torch.ops.s3cache_reaching.raw(x) * y


def _raw_first(x: Tensor, y: Tensor) -> Any:
    return torch.ops.s3cache_reaching.raw(x)[:4] * y


def _raw_cast(x: Tensor, y: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.ops.s3cache_reaching.raw(x) * y


def _mish(x: Tensor, y: Tensor) -> Any:
    return F.mish(x) * y


def _normed(x: Tensor, y: Tensor) -> Any:
    return F.layer_norm(x, (4,)) * y


def _softmax(x: Tensor, y: Tensor) -> Any:
    return F.softmax(x, -1) * y


def _products(x: Tensor, y: Tensor) -> Any:
    return torch.tanh(x @ y) @ y


def _checkpointed(x: Tensor, y: Tensor) -> Any:
    return checkpoint(_products, x, y, use_reentrant=False, context_fn=_Now.names["contexts"])


# -- what registers a hook


@contextlib.contextmanager
def _kernel(key: str, kernel: bool, hook: Any) -> Iterator[None]:
    """For one key of an operator that is defined by its schema."""
    library = torch.library.Library("s3cache_reaching", "FRAGMENT")
    try:
        library.define("raw(Tensor x) -> Tensor")
        if kernel:
            library.impl("raw", hook if key == "Meta" else torch.clone, "CPU")
        if key.startswith("Auto"):
            torch.library.register_fake("s3cache_reaching::raw", torch.empty_like, lib=library)
        library.impl("raw", hook, key)
        # As is done while a cache is enabled.
        record_kernel(f"s3cache_reaching/raw/{key}", hook, by_torch=False)
        yield
    finally:
        forget_kernels()
        library._destroy()


@contextlib.contextmanager
def _kernel_of_torchs(hook: Any) -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("mish", hook, "AutogradCPU")
        record_kernel("aten/mish/AutogradCPU", hook, by_torch=False)
        yield
    finally:
        forget_kernels()
        library._destroy()


def _option(config: Any, name: str, hook: Any) -> contextlib.AbstractContextManager[Any]:
    patched: contextlib.AbstractContextManager[Any] = config.patch({name: hook})
    return patched


def _decomposition(hook: Any) -> contextlib.AbstractContextManager[Any]:
    table = torch._inductor.decomposition.decompositions
    return _entry(table, torch.ops.aten.mish.default, hook)


def _lowering(hook: Any) -> contextlib.AbstractContextManager[Any]:
    return _entry(torch._inductor.lowering.lowerings, torch.ops.aten.sin.default, hook)


@contextlib.contextmanager
def _entry(table: dict[Any, Any], operator: Any, value: Any) -> Iterator[None]:
    before = dict(table)
    table[operator] = value
    try:
        yield
    finally:
        table.clear()
        table.update(before)


def _replaced(hook: Any) -> contextlib.AbstractContextManager[Any]:
    return patch.object(torch, "layer_norm", hook)


def _method(hook: Any) -> contextlib.AbstractContextManager[Any]:
    return patch.object(torch.Tensor, "softmax", hook)


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
        _subclass("Sub(func(*plain, **(kwargs or {{}})) * {reads})"),
        _wrapped,
        wraps=True,
    ),
    "rule": Hook(
        _subclass("Sub(func(*plain, **(kwargs or {{}})))")
        + "def rule(mode, func, kinds, args=(), kwargs=None):\n"
        "    return Sub(args[0].inner * {reads})",
        _ruled,
        wraps=True,
    ),
    "unflatten": Hook(
        _subclass("Sub(func(*plain, **(kwargs or {{}})))", unflattened=" * {reads}"),
        _wrapped,
        wraps=True,
    ),
    "context": Hook(
        _subclass("Sub(func(*plain, **(kwargs or {{}})) * args[0].by)", by="{reads}"),
        _wrapped,
        wraps=True,
    ),
    "carried": Hook(
        _CARRIED
        + _subclass("Sub(func(*plain, **(kwargs or {{}})) * args[0].by.read())", by="Carried()"),
        _wrapped,
        wraps=True,
    ),
    "carried function": Hook(
        "def carried(): return {reads}\n"
        + _subclass("Sub(func(*plain, **(kwargs or {{}})) * args[0].by())", by="carried"),
        _wrapped,
        wraps=True,
    ),
    **{
        f"kernel {key}": Hook(
            f"def hook(x): return {text}",
            program,
            around=functools.partial(_kernel, key, kernel),
        )
        for key, text, kernel, program in (
            ("Meta", "x.repeat({reads}, 1)", True, _raw_first),
            ("CompositeExplicitAutograd", "x.repeat({reads}, 1)", False, _raw_first),
            ("CompositeImplicitAutograd", "x * {reads}", False, _raw),
            ("Autograd", "x * {reads}", True, _raw),
            ("AutogradCPU", "x.sin() * {reads}", True, _raw),
            ("AutocastCPU", "x * {reads}", True, _raw_cast),
        )
    },
    "kernel of torch's": Hook(
        "def hook(x): return torch.sin(x) * {reads}", _mish, around=_kernel_of_torchs
    ),
    **{
        option: Hook(
            "def hook(graph): return {reads} and None",
            _products,
            around=functools.partial(_option, inductor, option),
        )
        for option in (
            "post_grad_custom_pre_pass",
            "post_grad_custom_post_pass",
            "joint_custom_pre_pass",
            "joint_custom_post_pass",
        )
    },
    "joint_custom_pass": Hook(
        "def hook(graph, inputs): return {reads} and graph",
        _products,
        around=functools.partial(_option, functorch, "joint_custom_pass"),
    ),
    "solver": Hook(
        "def hook(memory, runtimes, most): return float({reads}), [], []",
        _products,
        around=functools.partial(_option, functorch, "activation_memory_budget_solver"),
    ),
    "decomposition": Hook(
        "def hook(x): return torch.tanh(x) * {reads}", _mish, around=_decomposition
    ),
    "lowering": Hook("def hook(x): return {reads}", _operates, around=_lowering),
    "replaced": Hook(
        "def hook(x, *rest): return torch.tanh(x) * {reads}", _normed, around=_replaced
    ),
    "method": Hook("def hook(x, dim): return x.cumsum(dim) * {reads}", _softmax, around=_method),
    "policy": Hook(
        "def policy(ctx, op, *args, **kwargs):\n"
        "    from torch.utils.checkpoint import CheckpointPolicy\n"
        "    save = {reads} == 2\n"
        "    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE\n"
        "def contexts():\n"
        "    from torch.utils.checkpoint import create_selective_checkpoint_contexts\n"
        "    return create_selective_checkpoint_contexts(policy)",
        _checkpointed,
    ),
}
