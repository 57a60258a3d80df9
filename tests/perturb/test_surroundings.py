"""Under each setting that keys tell apart there are keys at all, and the same ones each time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import s3cache
from tests.support.machines import Machine
from tests.support.marks import slow


def _attends(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    batch = x[None, None]
    attended = torch.nn.functional.scaled_dot_product_attention(batch, batch, batch)
    return torch.nn.functional.linear(x, w) + attended[0, 0]


def _keys_under_each() -> dict[str, list[Any]]:
    from tests.perturb.changes import surroundings  # with what torch has deprecated

    found: dict[str, list[Any]] = {}
    for name, context in surroundings().items():
        for _ in range(2):
            torch.compiler.reset()
            with context():
                x, w = torch.ones(4, 4, device="cpu"), torch.ones(4, 4, device="cpu")
                report = s3cache.check(torch.compile(_attends), x, w.requires_grad_())
            found.setdefault(name, []).extend(
                each.key or [reason.message for reason in each.reasons] for each in report.graphs
            )
    return found


@slow
@pytest.mark.timeout(900)
def test_settings_of_torchs_keep_no_graph_from_the_cache(tmp_path: Path) -> None:
    """In a process of its own: torch does not take all of them back."""
    found = Machine(tmp_path).run(f"{__name__}:_keys_under_each").result
    assert len(found) > 30
    assert [name for name, keys in found.items() if len(keys) != 2] == []
    assert {name: keys for name, keys in found.items() if keys[0] != keys[1]} == {}
    assert [keys for keys in found.values() if not isinstance(keys[0], str)] == []
