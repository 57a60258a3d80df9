"""Never a wrong hit: a program with one change misses or gets the right answer.

Programs with several calls, each on another one's cache, also compile as often as without a cache.

``make test-perturb`` judges all changes, ``make test-nightly`` some three hundred of them, and
``make test`` some fifty: always the same ones, and some of each family.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.machines import Machine
from tests.support.marks import nightly, slow

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module", params=[48, pytest.param(120, marks=nightly)])
def count(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


@pytest.fixture(scope="module")
def verdicts(count: int, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    machine = Machine(tmp_path_factory.mktemp("machine"))
    # Takes minutes with --all, beside other tests; the limit of this module stops it if it hangs.
    done = machine.run("tests.perturb.run:part", count, timeout_s=850, server=0)
    found: dict[str, Any] = done.result
    return found


def test_no_change_gets_a_wrong_answer(verdicts: dict[str, Any]) -> None:
    assert verdicts["wrong"] == []


def test_no_program_that_is_made_again_misses(verdicts: dict[str, Any]) -> None:
    assert verdicts["lost"] == []


def test_enough_changes_could_be_judged(count: int, verdicts: dict[str, Any]) -> None:
    """torch itself rejects some changes, such as a transposed tensor in place of a flat one."""
    assert verdicts["judged"] >= count * 0.9, verdicts["broken"]


def test_most_changes_are_misses_and_some_are_right_hits(verdicts: dict[str, Any]) -> None:
    """If everything missed, keys would include things that do not matter."""
    misses = sum(family.get("miss", 0) for family in verdicts["counts"].values())
    assert misses > verdicts["judged"] / 2
    assert verdicts["right"]


@slow
def test_the_suite_can_fail(tmp_path: Path) -> None:
    """With torch's own key, inputs that overlap get the answer for inputs that do not."""
    found = Machine(tmp_path).run("tests.perturb.run:with_torchs_own_key", server=0).result
    assert any("sharing: half" in each for each in found["wrong"]), found


@nightly
def test_user_code_never_hits_an_entry_that_was_traced_in_another_state(tmp_path: Path) -> None:
    """User code may read any state of the process. ``make test-perturb`` judges all pairs."""
    found = Machine(tmp_path).run("tests.perturb.asking:judged", timeout_s=850, server=0).result
    assert found["wrong"] == []
    assert found["judged"] == 26
    assert found["counts"]["asking"]["miss"] > 6


@slow
def test_no_setting_of_torch_prevents_caching(tmp_path: Path) -> None:
    """Under each setting of torch, a graph has a key, and the same one each time."""
    found = Machine(tmp_path).run("tests.perturb.run:settings_kept", server=0).result
    assert len(found) > 30
    assert [name for name, keys in found.items() if len(keys) != 2 or keys[0] != keys[1]] == []
    assert [keys for keys in found.values() if not isinstance(keys[0], str)] == []


@slow
def test_another_environment_has_other_keys(tmp_path: Path) -> None:
    """The compiler is an exception: a hit does not need it."""
    environments = {
        "as it is": {},
        "processor": {"ATEN_CPU_CAPABILITY": "default"},
        "compiler": {"CXX": "another-g++"},
    }
    here, other, compiler = (
        Machine(tmp_path / name, **environment).run("tests.perturb.run:keys_here", server=0).result
        for name, environment in environments.items()
    )
    assert compiler == here
    for program in here:
        assert here[program] != other[program], program
