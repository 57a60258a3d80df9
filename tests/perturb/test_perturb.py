"""Never a wrong hit: change one thing, and it is a miss or the right answer.

Programs of several calls, each on another one's cache, also compile as often as without a cache.

``make test-perturb`` judges all the changes, ``make test-all`` some three hundred of them, and
``make test`` some fifty: always the same ones, and some of each family.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.machines import Machine
from tests.support.marks import slow

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module", params=[48, pytest.param(120, marks=slow)])
def count(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


@pytest.fixture(scope="module")
def verdicts(count: int, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    machine = Machine(tmp_path_factory.mktemp("machine"))
    # Minutes with --all, beside other tests: what hangs is for this module's own limit.
    done = machine.run("tests.perturb.run:part", count, timeout_s=850)
    found: dict[str, Any] = done.result
    return found


def test_no_change_gets_a_wrong_answer(verdicts: dict[str, Any]) -> None:
    assert verdicts["wrong"] == []


def test_no_program_made_anew_misses(verdicts: dict[str, Any]) -> None:
    assert verdicts["lost"] == []


def test_enough_could_be_judged(count: int, verdicts: dict[str, Any]) -> None:
    """Some changes mean nothing to torch itself: a transposed tensor in place of a flat one."""
    assert verdicts["judged"] >= count * 0.9, verdicts["broken"]


def test_most_changes_are_misses_and_some_are_right_hits(verdicts: dict[str, Any]) -> None:
    """If everything missed, the keys would hold what does not matter."""
    misses = sum(family.get("miss", 0) for family in verdicts["counts"].values())
    assert misses > verdicts["judged"] / 2
    assert verdicts["right"]


def test_an_explanation_names_what_was_changed(count: int, verdicts: dict[str, Any]) -> None:
    """All of the misses that are sampled; of all there are, see docs/explaining-misses.md."""
    found = verdicts["explained"]
    assert found["unnamed"] == []
    assert sum(found["missed"].values()) >= count // 3
    assert len(found["missed"]) >= 8  # families


@slow
def test_the_suite_can_fail(tmp_path: Path) -> None:
    """With torch's own key, inputs that overlap get the answer for inputs that do not."""
    found = Machine(tmp_path).run("tests.perturb.run:with_torchs_own_key").result
    assert any("sharing: half" in each for each in found["wrong"]), found


# What is different about a machine, by name.
ENVIRONMENTS = {
    "as it is": {},
    "processor": {"ATEN_CPU_CAPABILITY": "default"},
    "compiler": {"CXX": "another-g++"},
    "tag": {"TORCH_COMPILE_CACHE_KEY_TAG": "another"},
}


@pytest.fixture(scope="module")
def keys_with(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """The keys that a machine with the named environment makes; each is asked once."""
    root = tmp_path_factory.mktemp("environments")

    @functools.cache
    def ask(name: str) -> dict[str, Any]:
        machine = Machine(root / name, **ENVIRONMENTS[name])
        found: dict[str, Any] = machine.run("tests.perturb.cpu:keys_here").result
        return found

    return ask


@slow
def test_another_environment_has_other_keys(keys_with: Callable[[str], dict[str, Any]]) -> None:
    found = [keys_with(name)["ours"] for name in ("as it is", "processor", "tag")]
    for program in found[0]:
        assert len({str(keys[program]) for keys in found}) == 3, program


@slow
def test_another_compiler_has_the_same_keys(keys_with: Callable[[str], dict[str, Any]]) -> None:
    """A hit does not need it."""
    assert keys_with("compiler")["ours"] == keys_with("as it is")["ours"]


@slow
def test_torchs_own_key_does_not_tell_processors_apart(
    keys_with: Callable[[str], dict[str, Any]],
) -> None:
    """If this fails, torch has learnt it, and ours may let go of it."""
    here, there = keys_with("as it is"), keys_with("processor")
    assert here["capability"] != there["capability"]
    assert here["torch's"] == there["torch's"]
    assert here["torch's"] != keys_with("tag")["torch's"]
