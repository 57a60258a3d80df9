"""Modes of torch.compile."""

from __future__ import annotations

from typing import Any

import torch

from tests.kinds.case import Compile, case, matrix


@case("paths", graphs=3, shared=2)
def inference(compile_it: Compile) -> Any:
    """Inputs that need no gradients, ``no_grad``, and ``inference_mode``."""
    function = compile_it(lambda x: x.sin() + 1)
    found = [function(matrix())]
    with torch.no_grad():
        found.append(function(matrix(True)))
    with torch.inference_mode():
        out = function(matrix())
        found.append([out.is_inference(), out.clone()])
    return found


def _variants(entries: list[dict[str, Any]]) -> bool:
    """Return whether several entries have one key and different guards."""
    keys, guards = {e["key"] for e in entries}, {e["guards"] for e in entries}
    return len(keys) == 1 and len(guards) == len(entries) > 1


@case("paths", graphs=2, together=_variants)
def guard_variants_of_one_key(compile_it: Compile) -> Any:
    """Two equal graphs with code for different sizes: the branch is in AOTAutograd."""
    function = compile_it(lambda x: x[:, :3] @ x[:3, :], dynamic=True)
    found = []
    for columns in (3, 8, 3, 9):
        x = torch.ones(11, columns)  # equal sizes would be one symbol
        found.append((x, function(x)))
    return found


@case("paths", differs=("[1].stride",), slow=True)
def data_dependent_size(compile_it: Compile) -> Any:
    """A size that depends on the values (an unbacked symbol)."""

    def function(x: Any) -> Any:
        return torch.nonzero(x > 2) * 2

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        x = matrix()
        return x, compile_it(function)(x), function(x + 1)
