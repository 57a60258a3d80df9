"""Models as people train them: compiled on one machine, hit on an empty disk of another."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from tests.models.jobs import MODELS
from tests.support.machines import Machine, remote_url

if TYPE_CHECKING:
    from pathlib import Path

PROCESS_TIMEOUT_S = 600

pytestmark = pytest.mark.timeout(2 * PROCESS_TIMEOUT_S)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """What all models came to on the machine that compiled them, and on the next."""
    root = tmp_path_factory.mktemp("models")
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda name: _run(root / name, name), MODELS))
    return {name: each[0] for name, each in both}, {name: each[1] for name, each in both}


def _run(root: Path, model: str) -> tuple[str, list[Any]]:
    results = root / "results"
    results.mkdir(parents=True)
    found = []
    for place in ("first", "second"):
        outcome = Machine(root / place).run(
            "tests.models.jobs:run",
            [model],
            str(results),
            remote=remote_url(root),
            timeout_s=PROCESS_TIMEOUT_S,
        )
        found.append(outcome.result[model])
    return model, found


@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_is_hit_on_an_empty_disk_and_equal(
    name: str, ran: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    first, second = (each[name] for each in ran)
    assert first["bypassed"] == 0, first["reasons"]
    assert first["saved"] == first["misses"] > 0
    assert first["hits"] == 0
    assert first["error"] < 1e-4

    assert second["hits"] == first["saved"]
    assert (second["misses"], second["bypassed"], second["lowered"]) == (0, 0, 0)
    assert second["equal"]
    assert second["loss"] == first["loss"]
