"""Models as people train them: compiled on one machine, hit on an empty disk of another.

``make test-all`` has one model, ``make test-nightly`` the others too: a decoder, an encoder, both
together, and a vision model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.models.jobs import MODELS
from tests.support import beside
from tests.support.machines import Machine, remote_url
from tests.support.marks import cases, nightly, slow

if TYPE_CHECKING:
    from pathlib import Path

PROCESS_TIMEOUT_S = 600

pytestmark = pytest.mark.timeout(5 * PROCESS_TIMEOUT_S)


@slow
@pytest.mark.parametrize("name", cases(MODELS, slow_ones=(), nightly_ones=[*MODELS][1:]))
def test_a_training_step_is_hit_on_an_empty_disk_and_equal(name: str, tmp_path: Path) -> None:
    first, second = (_run(tmp_path, machine, name) for machine in ("first", "second"))
    saved, hit = first["counts"], second["counts"]
    assert saved["bypassed"] == 0, first["reasons"]
    assert saved["saved"] == saved["misses"] > 0
    assert saved["hits"] == 0
    assert first["error"] < 1e-4

    assert hit["hits"] == saved["saved"]
    assert (hit["misses"], hit["bypassed"], second["lowered"]) == (0, 0, 0)
    assert second["equal"]
    assert second["loss"] == first["loss"]


@nightly
@pytest.mark.parametrize("name", MODELS)
def test_no_process_starts_slower_than_with_torch_alone(name: str, tmp_path: Path) -> None:
    """On the same disk as one before; and a training step lowers nothing on an empty one."""
    _, alone = (_run(tmp_path, "alone", name, shared=False) for _ in range(2))
    first, again, second = (_run(tmp_path, place, name) for place in ("first", "first", "second"))
    assert first["lowered"] > 0
    assert beside.worse(beside.Started.of(again), beside.Started.of(alone)) == []
    assert beside.not_warm(beside.Started.of(second), second["reasons"]) == []


def _run(root: Path, machine: str, model: str, *, shared: bool = True) -> dict[str, Any]:
    results = root / "results"
    results.mkdir(exist_ok=True)
    outcome = Machine(root / machine).run(
        "tests.models.jobs:run",
        [model],
        str(results),
        remote=remote_url(root) if shared else None,
        timeout_s=PROCESS_TIMEOUT_S,
    )
    found: dict[str, Any] = outcome.result[model]
    return found
