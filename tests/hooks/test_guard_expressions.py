"""Guards on sizes of an entry, evaluated for a hit: as one condition each, with no branches."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from s3cache.hooks._conditions import install_guard_expressions, rewrite_min_max
from s3cache.hooks._state import Patches

_GUARD = "max(8 - min(5, L['t0']), L['t1'] + 2) >= 8 and L['t0'] < max(3, L['t1'], 7)"


@pytest.mark.parametrize("values", list(itertools.product((1, 4, 6, 9), repeat=2)))
def test_it_is_the_same_condition(values: tuple[int, int]) -> None:
    names = {"L": {"t0": values[0], "t1": values[1]}, "torch": torch}
    assert eval(rewrite_min_max(_GUARD), names) == eval(_GUARD, names)


@pytest.mark.parametrize("text", ["L['t0'] <= 4", "L['max(']", "max(L['t0']", "max(L['t0'])"])
def test_what_needs_no_change_or_cannot_be_read_stays(text: str) -> None:
    assert rewrite_min_max(text) == text


def test_a_hit_adds_no_guard_that_the_compile_had_not() -> None:
    assert _guarded(_GUARD) > 2  # each of torch's own branches is another one
    patches = Patches()
    install_guard_expressions(patches)
    try:
        assert _guarded(_GUARD) == 2
    finally:
        patches.undo()


def _guarded(guard: str) -> int:
    shapes = ShapeEnv()
    sizes = []
    for number, value in enumerate((4, 6)):
        source = ConstantSource(f"size{number}")
        symbol = shapes.create_symbol(value, source, DimDynamic.DYNAMIC)
        sizes.append(shapes.create_symintnode(symbol, hint=value, source=source))
    assert shapes.evaluate_guards_expression(guard, sizes)
    return len(shapes.guards)
