"""Random programs find nothing that was saved for others: and the search for it finds such a thing.

``make test-nightly`` searches for two minutes, ``make fuzz-hits`` for as long as it is asked to.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.hits.sketches import BLIND, Call, Sketch
from tests.hits.trials import Bench
from tests.support.machines import Machine
from tests.support.marks import nightly, slow

pytestmark = pytest.mark.timeout(900)

PROGRAM = Sketch(
    steps=("r0 = a.sin()", "r1 = helper(r0)"),
    outputs=(1,),
    hook="formula",
    place="dict",
    value=2.0,
    mode="enable_grad()",
    setting="",
    dynamic=None,
    calls=(Call(),),
)
CHANGED = replace(PROGRAM, value=3.0)


def judged(root: str, hook: str, value: float) -> dict[str, str]:
    """Judge the program with a hook, and the same where it reads another value."""
    program = replace(PROGRAM, hook=hook)
    changed = replace(program, value=value)
    verdict = Bench(Path(root)).judge(program, changed)
    return {"kind": verdict.kind, "why": verdict.why}


def _judged(root: Path, hook: str, value: float) -> dict[str, str]:
    """It forks, which hangs at times beside the threads of other tests: in its own process."""
    machine = Machine(root / "machine")
    done = machine.run("tests.hits.test_hits:judged", str(root), hook, value, timeout_s=850)
    return dict(done.result)


def test_a_value_read_while_tracing_makes_another_key(tmp_path: Path) -> None:
    assert _judged(tmp_path, "decomposed", CHANGED.value)["kind"] == "miss"


@slow
def test_a_backward_formula_that_reads_another_value_leaves_the_forward_a_hit(
    tmp_path: Path,
) -> None:
    """The forward graph does not depend on the value; the backward graph is compiled again."""
    assert _judged(tmp_path, PROGRAM.hook, CHANGED.value)["kind"] == "right"


@nightly
def test_a_wrong_hit_is_found(tmp_path: Path) -> None:
    """An operator that was registered as cacheable, then changed, has the old gradient."""
    assert _judged(tmp_path, BLIND, PROGRAM.value)["kind"] == "right"
    verdict = _judged(tmp_path, BLIND, CHANGED.value)
    assert verdict["kind"] == "wrong"
    assert "calls[0][4][0][0]" in verdict["why"]


@nightly
def test_random_programs_find_nothing_wrong() -> None:
    command = [sys.executable, "-m", "tests.hits", "--seconds", "120", "--jobs", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "right" in done.stdout
