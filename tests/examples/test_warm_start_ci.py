"""The example of a project that tests its own warm start works as its README says."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support.marks import slow
from tests.support.scripts import python

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "warm_start_ci"
# With all plugins that are installed here: a user's environment has some too.
ARGUMENTS = ["-q", "-p", "no:cacheprovider"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy, far from this repository."""
    return shutil.copytree(EXAMPLE, tmp_path / "project", ignore=shutil.ignore_patterns("__*"))


def run_tests(project: Path) -> subprocess.CompletedProcess[str]:
    return python("-m", "pytest", *ARGUMENTS, cwd=project, timeout_s=550)


# Compiles, and hits elsewhere, as tests/kinds does in every run.
@slow
@pytest.mark.timeout(900)
def test_its_tests_pass(project: Path) -> None:
    done = run_tests(project)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


@slow
def test_they_fail_where_nothing_is_cached(project: Path) -> None:
    """No misses are no proof of a warm start: this program never looks anything up."""
    (project / "train.py").write_text("print('loss 0.0')\n")
    done = run_tests(project)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "there was no cache; does the program enable s3cache" in done.stdout


def test_its_workflow_runs_what_the_readme_says() -> None:
    workflow = yaml.safe_load((EXAMPLE / ".github/workflows/tests.yml").read_text())
    [job] = workflow["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    readme = (EXAMPLE / "README.md").read_text()
    [block] = re.findall(r"^```\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE)
    said = [re.sub(r"--extra-index-url \S+ ", "", command) for command in commands]
    assert said == block.splitlines()
