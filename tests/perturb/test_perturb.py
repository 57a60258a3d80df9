"""Never a wrong hit: change one thing, and it is a miss or the right answer.

``make test-perturb`` judges all the changes, this some hundred of them, always the same ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.machines import Machine

pytestmark = pytest.mark.timeout(300)

_COUNT = 300


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    machine = Machine(tmp_path_factory.mktemp("machine"))
    found: dict[str, Any] = machine.run("tests.perturb.run:part", _COUNT).result
    return found


def test_no_change_gets_a_wrong_answer(verdicts: dict[str, Any]) -> None:
    assert verdicts["wrong"] == []


def test_enough_could_be_judged(verdicts: dict[str, Any]) -> None:
    """Some changes mean nothing to torch itself: a transposed tensor in place of a flat one."""
    assert verdicts["judged"] >= _COUNT * 0.9, verdicts["broken"]


def test_most_changes_are_misses_and_some_are_right_hits(verdicts: dict[str, Any]) -> None:
    """If everything missed, the keys would hold what does not matter."""
    misses = sum(family.get("miss", 0) for family in verdicts["counts"].values())
    assert misses > verdicts["judged"] / 2
    assert verdicts["right"]


def test_the_suite_can_fail(tmp_path: Path) -> None:
    """With torch's own key, inputs that overlap get the answer for inputs that do not."""
    found = Machine(tmp_path).run("tests.perturb.run:with_torchs_own_key").result
    assert any("sharing: half" in each for each in found["wrong"]), found


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    root = tmp_path_factory.mktemp("environments")
    changed = {
        "as it is": {},
        "processor": {"ATEN_CPU_CAPABILITY": "default"},
        "compiler": {"CXX": "another-g++"},
        "tag": {"TORCH_COMPILE_CACHE_KEY_TAG": "another"},
    }
    return {
        name: Machine(root / name, **environment).run("tests.perturb.cpu:keys_here").result
        for name, environment in changed.items()
    }


def test_another_environment_has_other_keys(environments: dict[str, dict[str, Any]]) -> None:
    for program in environments["as it is"]["ours"]:
        keys = [
            str(environments[name]["ours"][program]) for name in ("as it is", "processor", "tag")
        ]
        assert len(set(keys)) == 3, program


def test_another_compiler_has_the_same_keys(environments: dict[str, dict[str, Any]]) -> None:
    """A hit does not need it."""
    assert environments["compiler"]["ours"] == environments["as it is"]["ours"]


def test_torchs_own_key_does_not_tell_processors_apart(
    environments: dict[str, dict[str, Any]],
) -> None:
    """If this fails, torch has learnt it, and ours may let go of it."""
    here, there = environments["as it is"], environments["processor"]
    assert here["capability"] != there["capability"]
    assert here["torch's"] == there["torch's"]
    assert here["torch's"] != environments["tag"]["torch's"]
