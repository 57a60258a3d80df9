"""The Python on the README and in the documentation runs and prints what it says.

``make test`` has the programs of the README, and those of other pages that compile nothing.
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
    """Run a program with the warnings that Python shows by itself."""
    warnings.resetwarnings()
    hidden = DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning
    for category in hidden:
        warnings.simplefilter("ignore", category)
    runpy.run_path(path, run_name="__main__")


@pytest.mark.parametrize("code", BLOCKS)
def test_it_runs_and_prints_what_it_says(
    code: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    environment = dict(os.environ)
    # torch says so where it is installed without NumPy, which these do not need.
    environment["PYTHONWARNINGS"] = "ignore:Failed to initialize NumPy:UserWarning"
    for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME"):
        environment[name] = str(tmp_path)
    done: Any
    if request.node.get_closest_marker("slow"):  # of all on README.md torch is imported
        (tmp_path / "block.py").write_text(code)
        job = f"{__name__}:run_block", str(tmp_path / "block.py")
        done = machines.Machine(tmp_path / "machine").run(*job, server=0)
    else:
        done = python("-c", code, env=environment, cwd=ROOT)
        assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    expected = printed(code)
    assert expected, "a block that prints nothing shows nothing"
    assert done.stdout.splitlines() == expected
