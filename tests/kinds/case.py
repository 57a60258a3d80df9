"""Cases: small programs, each of which makes torch.compile produce one kind of entry."""

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
    """A program, and what the cache should make of it.

    Attributes:
        row: of the table "What the cache must hold" in the design.
        name: unique.
        program: is given ``torch.compile``, or for eager a function that changes nothing, and
            returns everything that can be observed: inputs, outputs, gradients, numbers.
        graphs: how many graphs of it are saved, and hit by the next machine.
        unsaved: how many are looked up, and cannot be saved as a whole.
        again: how many lookups of the first machine hit what it saved just before.
        halves: how many halves of graphs are saved, and hit by the next machine, at the second
            level: of those that are bypassed or unsaved.
        lowered: how many graphs every machine compiles, as none can cache them.
        bypassed: how many graphs are refused in each process.
        reasons: which reasons the cache gives for that.
        shows: whether the description of an entry, as plain data, has the kind that the case is
            about; some entry of the case must.
        together: the same of all its entries; they also have ``key`` and ``guards``.
        differs: observations in which torch.compile itself differs from eager, cache or not.
        since: the torch release before which such a graph is refused, if it matters.
        slow: another case shows nearly the same; only ``make test-all`` runs this one.
    """

    row: str
    name: str
    program: Program
    graphs: int = 1
    unsaved: int = 0
    again: int = 0
    halves: int = 0
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
    """Call it, go backward from every output that can, and return inputs, outputs, gradients."""
    outputs = function(*inputs)
    flat = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    total: Any = 0
    for index, each in enumerate(flat):
        if isinstance(each, Tensor) and each.grad_fn is not None:
            total = total + (each * (index + 1.5)).sum()
    total.backward()
    leaves = [each for each in inputs if isinstance(each, Tensor) and each.is_leaf]
    return inputs, flat, [each.grad for each in leaves]
