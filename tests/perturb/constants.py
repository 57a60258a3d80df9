"""Tables of torch's modules that make code, altered and replaced.

Decompositions compute in the type that a table names for that of the input: in float32 for
bfloat16. Each member has it name another, which can be seen in the result.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._prims_common as prims_common
import torch.nn.functional as F  # noqa: N812 - as everybody does
from torch import Tensor

__all__ = ["constants"]

Altering = Callable[[float], Callable[[], contextlib.AbstractContextManager[Any]]]

_TABLE = "_computation_dtype_map"
_NAMES = [
    "elu",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "leaky_relu",
    "logsigmoid",
    "mish",
    "selu",
    "silu",
    "softplus",
    "softshrink",
]
_HOWS = ("an item", "updated", "removed", "another table")


def constants() -> Iterator[tuple[str, Callable[[Tensor], Any], Altering]]:
    """Name, program, and what alters the table."""
    for name, how in itertools.product(_NAMES, _HOWS):
        make = functools.partial(functools.partial, _altered, how)
        yield f"{name}: {how}", functools.partial(_program, name), make


def _program(name: str, x: Tensor) -> Any:
    narrow = x.bfloat16()
    return getattr(F, name)(narrow).float() + x


@contextlib.contextmanager
def _altered(how: str, by: float) -> Iterator[None]:
    table: dict[torch.dtype, torch.dtype] = getattr(prims_common, _TABLE)
    before = dict(table)
    kind = torch.float16 if by == 2 else torch.bfloat16
    if how == "an item":
        table[torch.bfloat16] = kind
    elif how == "updated":
        table.update({torch.bfloat16: kind})
    elif how == "removed" and by == 3:
        del table[torch.bfloat16]
    elif how == "removed":
        table.clear()
        table[torch.bfloat16] = kind
    else:
        setattr(prims_common, _TABLE, {**table, torch.bfloat16: kind})
    try:
        yield
    finally:
        setattr(prims_common, _TABLE, table)
        table.clear()
        table.update(before)
