"""No mutant of a real program is recalled wrongly."""

from __future__ import annotations

import re

import pytest

from tests.features.recall.mutants import KINDS, mutants_of, real_programs
from tests.support.marks import nightly, slow
from tests.support.scripts import python


def test_a_mutant_has_one_change() -> None:
    """It is in one file of its program, or in the version of a package; Python can be parsed."""
    programs = real_programs()
    assert len(programs) >= 30
    kinds = set()
    for program in programs:
        for mutant in mutants_of(program, 7, seed=1):
            files = mutant.program.files
            changed = [place for place in files if files[place] != program.files[place]]
            assert len(changed) == 1 or (mutant.version != "1.0" and not changed), mutant
            for place in changed:
                if place.endswith(".py"):
                    compile(files[place], place, "exec")
            kinds.add(mutant.kind)
    assert kinds == {*KINDS}


@pytest.mark.timeout(14_400)  # for hangs
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("installed library", "variables and a file", "--each", "14"), marks=slow),
        pytest.param((), marks=nightly),
    ],
)
def test_no_mutant_is_recalled_wrongly(arguments: tuple[str, ...]) -> None:
    run = python(
        "-W", "ignore", "-m", "tests.features.recall.mutations", *arguments, timeout_s=14_400
    )
    last = re.findall(r"^all .* (\d+)$", run.stdout, re.MULTILINE)
    assert last == ["0"], run.stdout[-3000:] + run.stderr[-2000:]
    assert run.returncode == 0, run.stdout[-3000:]
