"""Settings at the first backward: it is lowered under these, not under those of the forward."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo.compiled_autograd
import torch._functorch.config as functorch
import torch._inductor.config as inductor
import torch._inductor.lowering
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.equal.programs import Call, Context, Pair, calling
from tests.support.switches import deterministic, precision, threads


def _cubed(x: Tensor) -> Tensor:
    return (x.half() * x.half() * 1.1).float().sin() * x


def _normed(x: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x.sigmoid(), (x.shape[-1],)) * x.exp()


def _times(x: Tensor) -> Tensor:
    return (x @ x.t()).tanh() @ x


def _input(width: int = 8) -> tuple[Tensor]:
    return (torch.linspace(-2, 3, 6 * width).view(6, width).requires_grad_(),)


# -- settings that affect lowered code


def _kept(saved: Tensor) -> Tensor:
    return saved


def _doubling(graph: Any) -> None:
    """A pass with a visible effect: it doubles the outputs of a graph."""
    output = next(iter(reversed(graph.nodes)))
    with graph.inserting_before(output):
        doubled = [
            each
            if not isinstance(each, torch.fx.Node)
            else graph.call_function(torch.ops.aten.mul.Tensor, (each, 2.0))
            for each in output.args[0]
        ]
    for before, after in zip(output.args[0], doubled, strict=True):
        if isinstance(after, torch.fx.Node):
            after.meta.update(before.meta)
    output.args = (type(output.args[0])(doubled),)


_SETTINGS: dict[str, Context] = {
    "doubling": functools.partial(inductor.patch, {"post_grad_custom_post_pass": _doubling}),
    "emulated casts": functools.partial(inductor.patch, {"emulate_precision_casts": True}),
    "unsafe math": functools.partial(inductor.patch, {"cpp.enable_unsafe_math_opt_flag": True}),
    "not fused": functools.partial(inductor.patch, {"max_fusion_size": 1}),
    "three threads": functools.partial(threads, 3),
    "deterministic": deterministic,
    "medium precision": functools.partial(precision, "medium"),
    "autocast": functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16),
}


# -- more settings, and more kinds of graphs


def _checkpointed(x: Tensor) -> Any:
    return checkpoint(_times, x, use_reentrant=False) * 2


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.cos() * 3


def _of_a_function(x: Tensor) -> Any:
    return _Own.apply(x) * x


def _in_two(x: Tensor) -> Tensor:
    y = x.sin() * 2
    torch._dynamo.graph_break()
    return y.exp() + x


def _changing(x: Tensor) -> Tensor:
    y = x * 2
    y[1:].mul_(y[:-1])
    return y.sigmoid() * x


_FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "cubed": _cubed, "normed": _normed, "times": _times, "checkpointed": _checkpointed,
    "function": _of_a_function, "two graphs": _in_two, "changing": _changing,
}  # fmt: skip


@contextlib.contextmanager
def _decomposing() -> Iterator[None]:
    """Replace the lowering of a product with one that has a visible effect: it adds 1."""
    table = torch._inductor.lowering.lowerings
    operator = torch.ops.aten.mul.Tensor
    before = table[operator]
    table[operator] = lambda x, y: table[torch.ops.aten.add.Tensor](before(x, y), 1)
    try:
        yield
    finally:
        table[operator] = before


_MORE_SETTINGS: dict[str, Context] = {
    **_SETTINGS,
    "lowering": _decomposing,
    "no pattern matching": functools.partial(inductor.patch, {"pattern_matcher": False}),
    "no mkldnn": functools.partial(torch.backends.mkldnn.flags, enabled=False),
    "anomaly": functools.partial(torch.autograd.set_detect_anomaly, True),
    "compiled autograd": functools.partial(
        torch._dynamo.compiled_autograd._enable, functools.partial(torch.compile, backend="eager")
    ),
    "hooks on what is saved": lambda: torch.autograd.graph.saved_tensors_hooks(_kept, _kept),
    "recomputed": functools.partial(functorch.patch, {"activation_memory_budget": 0.3}),
}


def backwards() -> Iterator[Pair]:
    """Yield each setting at the backward of each kind of graph, for one of the two programs."""
    plain = contextlib.nullcontext
    for name, context in _MORE_SETTINGS.items():
        for kind, (shape, function) in itertools.product(
            ("was on", "is on"), enumerate(_FUNCTIONS.items())
        ):
            title, program = function
            dynamic = True if shape % 3 == 0 else None
            before, after = (context, plain) if kind == "was on" else (plain, context)
            native = name in _SETTINGS and program in (_cubed, _normed, _times)
            keep = (shape + (kind == "is on")) % 3 == 1
            yield calling(
                "backwards",
                f"{name} {kind} for {title}, {dynamic=}, {'kept' if keep else 'freed'}",
                program,
                (Call(_input, backward=before),),
                (
                    Call(_input, backward=after, keep=keep),
                    Call(_input, backward=plain),
                    Call(_input, backward=context),
                    Call(functools.partial(_input, 16), backward=after),
                ),
                {"dynamic": dynamic},
                as_cold=True,
                # torch refuses a deterministic backward after a forward that was not. A kernel with
                # unsafe math makes the process flush denormals from then on.
                must_hit=native and name not in ("deterministic", "unsafe math"),
                native=native,
                filled=f"{name if kind == 'was on' else 'plain'} {title} {dynamic} {native}",
            )
