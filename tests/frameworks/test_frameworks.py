"""Programs that need only torch or transformers, on two machines; others: make test-frameworks.

``make test-all`` runs the compiled optimizer, ``make test-nightly`` runs the others.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.trials import FOLDER, PROGRAMS, SHARED, complaints, run_program
from tests.support.marks import cases

OF_TORCH = {name for name, program in PROGRAMS.items() if program.framework == "torch"}
HERE = sorted({*OF_TORCH, "generate_static_cache"})

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize(
    "name", cases(HERE, slow_ones=HERE, nightly_ones={*HERE} - {"compiled_optimizer"})
)
def test_a_program_starts_warm_on_a_machine_that_never_ran_it(name: str, tmp_path: Path) -> None:
    """``run`` enables s3cache on one machine, a variable on the other; losses are equal."""
    trials = dict(run_program(tmp_path, name, PROGRAMS[name], ("first", "third")))
    assert list(complaints(trials)) == []


def test_each_program_is_in_the_catalog_and_does_not_mention_s3cache() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == set(PROGRAMS)
    files = [*FOLDER.glob("*.py"), *SHARED.glob("*.py")]
    assert [path for path in files if "s3cache" in path.read_text(encoding="utf-8")] == []
