"""Settings at the first backward: it is lowered under them, and not under those of the forward."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._inductor.config as inductor
from torch import Tensor

from tests.perturb.histories import Call, Context, History
from tests.support.switches import deterministic, precision, threads

__all__ = ["backwards"]


def _cubed(x: Tensor) -> Tensor:
    return (x.half() * x.half() * 1.1).float().sin() * x


def _normed(x: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x.sigmoid(), (x.shape[-1],)) * x.exp()


def _times(x: Tensor) -> Tensor:
    return (x @ x.t()).tanh() @ x


_FUNCTIONS: tuple[Callable[[Tensor], Tensor], ...] = (_cubed, _normed, _times)


def _input() -> tuple[Tensor]:
    return (torch.linspace(-2, 3, 48).view(6, 8).requires_grad_(),)


# -- settings that lowered code depends on


def _doubling(graph: Any) -> None:
    """A pass that can be seen at work: it doubles what a graph returns."""
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


def backwards() -> Iterator[History]:
    """One setting at the backward of what is cached, and none at that of the hit; and reversed."""
    functions = itertools.cycle(_FUNCTIONS)
    plain = contextlib.nullcontext
    for name, context in _SETTINGS.items():
        for first, second, how in (
            (context, plain, "was on"),
            (plain, context, "is on"),
            (context, context, "both times"),
        ):
            for keep in (False, True):
                yield History(
                    "backwards",
                    f"{name} {how}, {'kept' if keep else 'freed'}",
                    next(functions),
                    (Call(_input, backward=first),),
                    (
                        Call(_input, backward=second, keep=keep),
                        Call(_input, backward=plain),
                        Call(_input, backward=context),
                    ),
                    # torch itself refuses that backward of a forward that was not deterministic.
                    must_hit=name != "deterministic",
                )
    for dynamic in (None, True):
        for function in _FUNCTIONS:
            yield History(
                "backwards",
                f"{function.__name__} for inputs at rest, dynamic={dynamic}",
                function,
                (Call(_input, backward=plain, keep=True),),
                (Call(_input, backward=plain), Call(_input, backward=plain)),
                {"dynamic": dynamic},
                must_hit=True,
            )
