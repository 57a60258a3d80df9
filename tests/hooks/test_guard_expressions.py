"""A hit evaluates guards on sizes without branches, so that it adds no other guards."""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path

import pytest
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

import s3cache
from s3cache.torch_api import internals

_GUARD = "max(8 - min(5, L['t0']), L['t1'] + 2) >= 8 and L['t0'] < max(3, L['t1'], 7)"


@pytest.mark.parametrize("values", list(itertools.product((1, 4, 6, 9), repeat=2)))
def test_branch_free_functions_give_the_same_result(values: tuple[int, int]) -> None:
    names = {"L": {"t0": values[0], "t1": values[1]}}
    assert eval(_GUARD, dict(internals.branch_free()), names) == eval(_GUARD, {}, names)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from torch's own imports
def test_a_hit_adds_no_guards_for_branches(tmp_path: Path) -> None:
    """Each branch in Python's own functions adds a guard, also once the cache is off again."""
    importlib.import_module(internals.COMPILER)  # the hooks wait for it
    before = _guards_added()
    with s3cache.enabled(local_dir=tmp_path):
        assert _guards_added() == 2
    assert _guards_added() == before > 2


def _guards_added() -> int:
    shapes = ShapeEnv()
    sizes = []
    for number, value in enumerate((4, 6)):
        source = ConstantSource(f"size{number}")
        symbol = shapes.create_symbol(value, source, DimDynamic.DYNAMIC)
        sizes.append(shapes.create_symintnode(symbol, hint=value, source=source))
    assert shapes.evaluate_guards_expression(_GUARD, sizes)
    return len(shapes.guards)
