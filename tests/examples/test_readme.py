"""The Python programs in the README and the documentation run and print the stated output.

``make test`` runs the programs of the README, and those of other pages that compile nothing.
"""

from __future__ import annotations

import os
import runpy
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.support import machines
from tests.support.marks import slow
from tests.support.pages import ROOT, printed, programs
from tests.support.scripts import python

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

BLOCKS = [
    pytest.param(
        code,
        id=f"{page.name}-{number}",
        marks=[slow] if "torch" in code and page.name != "README.md" else [],
    )
    for page in PAGES
    for number, code in enumerate(programs(page))
]


def run_block(path: str) -> None:
    """Run a program with Python's default warnings."""
    warnings.resetwarnings()
    hidden = DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning
    for category in hidden:
        warnings.simplefilter("ignore", category)
    runpy.run_path(path, run_name="__main__")


@pytest.mark.parametrize("code", BLOCKS)
def test_a_program_runs_and_prints_the_stated_output(
    code: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    environment = dict(os.environ)
    # torch warns if NumPy is not installed; these programs do not need it.
    environment["PYTHONWARNINGS"] = "ignore:Failed to initialize NumPy:UserWarning"
    for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME"):
        environment[name] = str(tmp_path)
    done: Any
    if request.node.get_closest_marker(
        "slow"
    ):  # programs of README.md import torch in a new process
        (tmp_path / "block.py").write_text(code)
        job = f"{__name__}:run_block", str(tmp_path / "block.py")
        done = machines.Machine(tmp_path / "machine").run(*job, server=0)
    else:
        done = python("-c", code, env=environment, cwd=ROOT)
        assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    expected = printed(code)
    assert expected, "the program must print something"
    assert done.stdout.splitlines() == expected
