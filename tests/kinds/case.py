"""Cases: small programs that each make torch.compile produce one kind of entry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

Compile: TypeAlias = Callable[..., Any]
Program: TypeAlias = Callable[[Compile], Any]


@dataclass(frozen=True)
class Case:
    """A program, and the expected behaviour of the cache.

    Attributes:
        row: the row of the table "What the cache must hold" in the design.
        name: the unique name.
        program: a function of ``torch.compile`` (in eager mode, of a function that changes
            nothing), which returns all that can be observed: inputs, outputs, gradients, numbers.
        graphs: the number of graphs that are saved, and that hit on the next machine.
        unsaved: the number of graphs that are looked up, but cannot be saved as a whole.
        again: the number of lookups that hit entries that the first machine has just saved.
        halves: the number of halves of bypassed or unsaved graphs that are saved at the second
            level, and that hit on the next machine.
        shared: the number of lookups on the first machine that hit halves of other graphs of the
            case, which it has just saved as a whole.
        lowered: the number of graphs that each machine compiles, because they cannot be cached.
        bypassed: the number of graphs that each process bypasses.
        reasons: the reasons of these bypasses.
        shows: returns whether the description of an entry, as plain data, has the kind of this
            case; one entry of the case must have it.
        together: the same for all entries of the case; they also have ``key`` and ``guards``.
        differs: observations in which torch.compile differs from eager, also without a cache.
        since: the first torch release that can cache such a graph, if it matters.
        slow: whether only ``make test-all`` runs this case, because another one is similar.
    """

    row: str
    name: str
    program: Program
    graphs: int = 1
    unsaved: int = 0
    again: int = 0
    halves: int = 0
    shared: int = 0
    lowered: int = 0
    bypassed: int = 0
    reasons: tuple[str, ...] = ()
    shows: Callable[[dict[str, Any]], bool] | None = None
    together: Callable[[list[dict[str, Any]]], bool] | None = None
    differs: tuple[str, ...] = ()
    since: tuple[int, int] = (0, 0)
    slow: bool = False


CASES: dict[str, Case] = {}


def case(row: str, **expected: Any) -> Callable[[Program], Program]:
    """Register the decorated program under its own name; see :class:`Case`."""

    def register(program: Program) -> Program:
        name = program.__name__
        assert name not in CASES, name
        CASES[name] = Case(row, name, program, **expected)
        return program

    return register


def matrix(requires_grad: bool = False, rows: int = 2) -> Any:
    """Return a matrix of three columns."""
    return torch.arange(3.0 * rows).reshape(rows, 3).requires_grad_(requires_grad)


def train(function: Callable[..., Any], *inputs: Any) -> Any:
    """Call it, run backward from its differentiable outputs; return inputs, outputs, gradients."""
    outputs = function(*inputs)
    flat = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    total: Any = 0
    for index, each in enumerate(flat):
        if isinstance(each, Tensor) and each.grad_fn is not None:
            total = total + (each * (index + 1.5)).sum()
    total.backward()
    leaves = [each for each in inputs if isinstance(each, Tensor) and each.is_leaf]
    return inputs, flat, [each.grad for each in leaves]
