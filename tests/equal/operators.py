"""Torch's own samples of its operators: a second run of each must hit all that the first saved."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves

from tests.equal.programs import Compile, Pair


@dataclass(frozen=True)
class Operator:
    """The first sample of an operator, forward and backward.

    Attributes:
        info: torch's description of the operator.
    """

    info: Any

    def play(self, compile_it: Compile) -> Iterator[Any]:
        """Yield outputs, mutated inputs and gradients, or the class of the error."""
        has_backward = self.info.supports_autograd
        _seed()
        samples = self.info.sample_inputs("cpu", torch.float32, requires_grad=has_backward)
        if (sample := next(iter(samples), None)) is None:
            return

        def function(*args: Any, **kwargs: Any) -> Any:
            return self.info.op(*args, **kwargs)

        _seed()
        try:
            with torch._inductor.config.patch(fallback_random=True):
                result = compile_it(function)(sample.input, *sample.args, **sample.kwargs)
                outputs = tree_leaves(result)
                inputs = tree_leaves((sample.input, sample.args, sample.kwargs))
                if "empty" in self.info.name.split("_"):
                    for each in outputs:
                        each.detach().zero_()  # its shape is defined, its values are not
                yield [*outputs, *inputs, *(_gradients(outputs, inputs) if has_backward else ())]
        except Exception as exc:
            yield f"raises {type(exc).__name__}"


def _seed() -> None:
    random.seed(0)
    torch.manual_seed(0)


def _gradients(outputs: list[Any], inputs: list[Any]) -> list[Any]:
    reached, leaves = (
        [each for each in values if isinstance(each, torch.Tensor) and each.requires_grad]
        for values in (outputs, inputs)
    )
    leaves = [each for each in leaves if each.is_leaf]
    if not reached or not leaves:
        return []
    ones = [torch.ones_like(each) for each in reached]
    return list(torch.autograd.grad(reached, leaves, ones, allow_unused=True))


def operators() -> Iterator[Pair]:
    """Yield a pair of equal programs for each operator."""
    for info in op_db:
        if torch.float32 in info.supported_dtypes("cpu"):
            how: Any = {"all_hit": True, "as_cold": True}
            yield Pair("samples", info.formatted_name, Operator(info), Operator(info), **how)
