"""Nothing is recalled wrongly after thousands of edits, changed answers and restarts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.features.recall.mutants import KINDS, mutants_of, real_programs
from tests.features.recall.restarts import JOBS, restart_all
from tests.support.marks import nightly, slow
from tests.support.scripts import python

pytestmark = pytest.mark.timeout(14_400)  # for hangs


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


@pytest.mark.parametrize("kind", ["value", "process"])
@nightly
def test_no_changed_answer_is_recalled(kind: str) -> None:
    sweep = ("-m", "tests.features.recall.sweep", "--kind", kind)
    run = python("-W", "ignore", *sweep, timeout_s=7200)
    assert " 0 wrong, 0 failed; " in run.stdout


@pytest.mark.parametrize(
    ("words", "restarts"),
    [
        pytest.param(("configuration", "break"), 5, marks=slow),
        pytest.param(("",), 500, marks=nightly),
    ],
)
def test_no_restart_disagrees_or_traces_in_vain(
    words: tuple[str, ...], restarts: int, tmp_path: Path
) -> None:
    """From the third restart of a job on, nothing is traced that could have been recalled."""
    jobs = [job for job in JOBS if any(word in job.name for word in words)]
    found = [*restart_all(jobs, tmp_path, restarts, at_once=2)]
    assert [fault for _, done in found for fault in done.wrong] == []
    assert all(done.recalled and done.agreed for _, done in found)


def test_there_are_ten_jobs() -> None:
    assert len(JOBS) == 10
