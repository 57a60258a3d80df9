"""``make test`` leaves dense cases out and says so; ``make test-all`` runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# pytest starts within pytest, with workers of its own.
pytestmark = pytest.mark.timeout(120)

CASES = """\
import pytest
from tests.support.density import cases, examples, selected

@pytest.fixture(scope="module")
def chosen(request):
    return selected(request, "name")

@pytest.mark.parametrize("name", cases("abc", dense_ones="bc"))
def test_case(name, chosen, pytestconfig):
    everything = pytestconfig.getoption("--all")
    assert chosen == (set("abc") if everything else {"a"})
    assert examples(2) == (200 if everything else 50)
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    suite = tmp_path / "suite"
    suite.mkdir()
    (suite / "test_cases.py").write_text(CASES)
    return suite


def closing_lines(suite: Path, *arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.support.density", *arguments, str(suite)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-2:]


@pytest.mark.parametrize("workers", ["0", "2"])
def test_what_is_left_out_is_counted(suite: Path, workers: str) -> None:
    """Also by the process that collects nothing itself."""
    told, closing = closing_lines(suite, "-n", workers, "-p", "no:cacheprovider")
    assert told == "left to make test-all: 2 tests (2 of suite)"
    assert " 1 passed" in closing


def test_all_leaves_nothing_out(suite: Path) -> None:
    told, closing = closing_lines(suite, "--all", "-p", "no:cacheprovider")
    assert "left to make test-all" not in told
    assert "3 passed" in closing
