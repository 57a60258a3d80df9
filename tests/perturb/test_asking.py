"""Whatever code of the user's asks of the process, no hit is on what was made of another answer."""

from __future__ import annotations

from pathlib import Path

import pytest

import tests.support.compiler  # noqa: F401 - before what imports the compiler
from tests.perturb.asking import asked
from tests.support.machines import Machine
from tests.support.marks import slow


@slow
@pytest.mark.timeout(900)
def test_a_hit_is_never_on_what_was_traced_of_another_answer(tmp_path: Path) -> None:
    """A dozen of them; ``make test-perturb`` has all."""
    found = Machine(tmp_path).run("tests.perturb.asking:judged", 12, timeout_s=850).result
    assert found["wrong"] == []
    assert found["judged"] == 12
    assert found["counts"]["asking"]["miss"] > 3


def test_there_are_enough_of_them() -> None:
    names = [each.name for each in asked()]
    assert len(set(names)) == len(names) > 200
    assert sum(each.must_hit for each in asked()) > 40
