"""The example of a project that tests its own warm start works as its README says."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.marks import slow
from tests.support.pages import ROOT, files

EXAMPLE = ROOT / "examples" / "warm_start_ci"


# Compiles, and hits elsewhere, as tests/models does in every run.
@slow
@pytest.mark.timeout(900)
def test_its_tests_pass(tmp_path: Path) -> None:
    """Far from this repository, with all plugins that are installed here, as a user has some."""
    project = shutil.copytree(EXAMPLE, tmp_path / "project", ignore=shutil.ignore_patterns("__*"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=project,
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_its_test_is_on_the_page() -> None:
    name = "tests/test_warm_start.py"
    assert files(ROOT / "docs" / "testing.md") == {
        name: (EXAMPLE / name).read_text(encoding="utf-8")
    }


def test_its_workflow_runs_what_the_readme_says() -> None:
    workflow = yaml.safe_load((EXAMPLE / ".github/workflows/tests.yml").read_text())
    [job] = workflow["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    readme = (EXAMPLE / "README.md").read_text()
    [block] = re.findall(r"^```\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE)
    said = [re.sub(r"--extra-index-url \S+ ", "", command) for command in commands]
    assert said == block.splitlines()
