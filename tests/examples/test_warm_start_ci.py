"""The example project that tests its own warm start works as its README says."""

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
# All installed plugins stay on: a user's environment has some too.
ARGUMENTS = ["-q", "-p", "no:cacheprovider"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Copy the example to a directory outside of this repository."""
    return shutil.copytree(EXAMPLE, tmp_path / "project", ignore=shutil.ignore_patterns("__*"))


def run_tests(project: Path) -> subprocess.CompletedProcess[str]:
    return python("-m", "pytest", *ARGUMENTS, cwd=project, timeout_s=550)


# Slow only: tests/equal/kinds checks in every run that a program compiles here and hits elsewhere.
@slow
@pytest.mark.timeout(900)
def test_its_tests_pass(project: Path) -> None:
    done = run_tests(project)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_its_workflow_runs_the_commands_of_the_readme() -> None:
    workflow = yaml.safe_load((EXAMPLE / ".github/workflows/tests.yml").read_text())
    [job] = workflow["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    readme = (EXAMPLE / "README.md").read_text()
    [block] = re.findall(r"^```\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE)
    shortened = [re.sub(r"--extra-index-url \S+ ", "", command) for command in commands]
    assert shortened == block.splitlines()


@slow
def test_its_tests_fail_if_nothing_is_cached(project: Path) -> None:
    """This program has no misses only because it never looks up anything."""
    (project / "train.py").write_text("print('loss 0.0')\n")
    done = run_tests(project)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "there was no cache; does the program enable s3cache" in done.stdout
