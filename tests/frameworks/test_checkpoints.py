"""Trainers call the callbacks of ``flush_at_checkpoint``, where they are installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.frameworks.checkpoints import TRAINERS, flushes

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.timeout(300)
@pytest.mark.parametrize("framework", TRAINERS)
def test_a_training_is_flushed_at_each_checkpoint(framework: str, tmp_path: Path) -> None:
    for package in (framework, *({"accelerate"} if framework == "transformers" else ())):
        pytest.importorskip(package, reason="make test-frameworks has it")
    assert len(flushes(framework, tmp_path)) >= 2
