"""Programs: compute their keys, run them, and run them compiled."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import s3cache
from s3cache.graph import Report

Record = list[Any]


@dataclass(frozen=True)
class Program:
    """A function to compile, and the context in which it is compiled.

    Attributes:
        make: returns a new callable and new arguments each time.
        context: the context of making, compiling and running it.
        options: of ``torch.compile``.
    """

    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Change:
    """A program that differs from a base program in one thing.

    Attributes:
        family: the kind of change.
        name: the change.
        base: the name of the base program.
        program: the changed program.
        same: whether it is the base program made again, which must hit.
    """

    family: str
    name: str
    base: str
    program: Program
    same: bool = False

    def __str__(self) -> str:
        return f"{self.base}: {self.family}: {self.name}"


def keys(program: Program) -> list[str | None]:
    """Return the key of each graph, or ``None`` if it cannot be cached; compile nothing."""
    return [graph.key for graph in report_of(program).graphs]


def report_of(program: Program) -> Report:
    """Return s3cache's report of the program; compile nothing."""
    torch.manual_seed(0)
    with program.context():
        function, args = program.make()
        return s3cache.check(torch.compile(function, **program.options), *args)


def eager(program: Program) -> Record:
    """Run the program without a compiler."""
    return _run(program, lambda function: function)


def compiled(program: Program) -> Record:
    """Run the program compiled."""
    torch._dynamo.reset()
    try:
        return _run(program, lambda function: torch.compile(function, **program.options))
    finally:
        torch._dynamo.reset()


def _run(program: Program, prepare: Callable[[Any], Any]) -> Record:
    torch.manual_seed(0)
    with program.context():
        function, args = program.make()
        for each in args:
            if isinstance(each, Tensor) and each.requires_grad and not each.is_leaf:
                each.retain_grad()
        result = prepare(function)(*args)
        outputs = result if isinstance(result, (list, tuple)) else [result]
        with torch.enable_grad():
            losses = [_loss(each) for each in outputs if isinstance(each, Tensor)]
            wanted = [each for each in losses if each is not None]
            if wanted:
                sum(wanted[1:], wanted[0]).backward()
    parameters = list(function.parameters()) if isinstance(function, nn.Module) else []
    touched = [each for each in (*args, *parameters) if isinstance(each, Tensor)]
    return [
        [record(each) for each in outputs],
        [record(each) for each in touched],
        [record(each.grad) for each in touched if each.is_leaf or each.retains_grad],
    ]


def _loss(output: Tensor) -> Tensor | None:
    if not output.requires_grad or output.is_meta or output.is_inference():
        return None
    flat = output.float().reshape(-1)
    return (flat * torch.arange(1.0, 1 + flat.numel(), device=flat.device).cos()).sum()


def record(value: Any) -> Any:
    """Return all visible properties of a tensor, or the ``repr()`` of another value."""
    if not isinstance(value, Tensor):
        return repr(value)
    plain = value.detach()
    visible = [str(plain.dtype), list(plain.shape), list(plain.stride()), value.requires_grad]
    if plain.is_meta:
        return visible
    plain = plain.resolve_conj().resolve_neg()
    numbers = torch.view_as_real(plain) if plain.is_complex() else plain
    return [*visible, numbers.double().flatten().tolist()]


def difference(found: Record, expected: Record) -> str | None:
    """Return where two records differ by more than rounding, or ``None``."""
    for part, ours, theirs in zip(("output", "argument", "grad"), found, expected, strict=True):
        if why := difference_of(ours, theirs):
            return f"{part} {why}"
    return None


def difference_of(ours: Any, theirs: Any) -> str | None:
    """Return the same for lists of records, or for texts in place of them."""
    if isinstance(ours, str) or isinstance(theirs, str):
        return _differs(ours, theirs)
    if len(ours) != len(theirs):
        return f"count: {len(ours)}, not {len(theirs)}"
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if why := _differs(one, other):
            return f"{index}: {why}"
    return None


def _differs(one: Any, other: Any) -> str | None:
    if isinstance(one, str) or isinstance(other, str):
        return None if one == other else f"{one}, not {other}"
    if one[:4] != other[:4]:
        return f"{one[:4]}, not {other[:4]}"
    if len(one) == 4:
        return None
    tolerance = 3e-2 if one[0] in ("torch.bfloat16", "torch.float16") else 2e-4
    for index, (a, b) in enumerate(zip(one[4], other[4], strict=True)):
        if not math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance) and not _both_nan(a, b):
            return f"element {index} is {a}, not {b}"
    return None


def _both_nan(a: float, b: float) -> bool:
    return math.isnan(a) and math.isnan(b)
