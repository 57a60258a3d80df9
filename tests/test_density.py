"""What ``make test`` and ``make test-all`` leave out is said; ``make test-nightly`` runs all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.density import cases, dense
from tests.support.waiting import LONG_S

ROOT = Path(__file__).resolve().parents[1]

# pytest starts within pytest, with workers of its own.
pytestmark = pytest.mark.timeout(900)

CASES = """\
import pytest
from tests.support.density import cases, examples, selected

@pytest.fixture(scope="module")
def chosen(request):
    return selected(request, "name")

@pytest.mark.parametrize("name", cases("abcd", dense_ones="bc", nightly_ones="d"))
def test_case(name, chosen, pytestconfig):
    option = pytestconfig.getoption
    run = "nightly" if option("--nightly") else "all" if option("--all") else ""
    expected = {"": "a", "all": "abc", "nightly": "abcd"}[run]
    if option("--left"):
        expected = {"all": "bc", "nightly": "d"}[run]
    assert chosen == set(expected)
    assert examples(2) == (200 if run else 50)
"""
MORE = """\
from hypothesis import given, strategies
from tests.support.density import scaled

@given(strategies.integers())
def test_drawn(number):
    pass

@scaled
def test_scaled():
    pass

def test_plain():
    pass
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    suite = tmp_path / "suite"
    suite.mkdir()
    (suite / "test_cases.py").write_text(CASES)
    return suite


def closing_lines(suite: Path, *arguments: str) -> tuple[str, str]:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "tests.support.density", *arguments),
            # Where runs share a directory, one removes what another one is just looking at.
            f"--basetemp={suite.parent / 'base'}",
            str(suite),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LONG_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = done.stdout.splitlines()
    return "\n".join(told[:-1]), told[-1]


SPARSE = """\
import pytest
from tests.support.density import sparse

@sparse
class TestSparse:
    @pytest.mark.parametrize("number", range(3))
    def test_many(self, number):
        pass

    def test_one(self):
        pass
"""


def test_one_case_runs_of_what_is_sparse(suite: Path) -> None:
    (suite / "test_cases.py").write_text(SPARSE)
    told, closing = closing_lines(suite, "-v", "-p", "no:cacheprovider")
    assert "2 passed, 2 deselected" in closing
    assert "::test_many[2] PASSED" in told
    assert "::test_one PASSED" in told


@pytest.mark.parametrize("workers", cases("02", dense_ones="0"))
def test_what_is_left_out_is_counted(suite: Path, workers: str) -> None:
    """Also by the process that collects nothing itself."""
    told, closing = closing_lines(suite, "-n", workers, "-p", "no:cacheprovider")
    assert "left to make test-all: 2 tests (2 of suite)" in told
    assert told.endswith("left to make test-nightly: 1 tests (1 of suite)")
    assert " 1 passed" in closing


def test_all_leaves_only_the_night_out(suite: Path) -> None:
    told, closing = closing_lines(suite, "--all", "-p", "no:cacheprovider")
    assert "left to make test-all" not in told
    assert told.endswith("left to make test-nightly: 1 tests (1 of suite)")
    assert "3 passed" in closing


@dense
def test_the_night_leaves_nothing_out(suite: Path) -> None:
    told, closing = closing_lines(suite, "--nightly", "-p", "no:cacheprovider")
    assert "left to" not in told
    assert "4 passed" in closing


@dense
def test_a_sparse_class_may_leave_its_cases_to_the_night(suite: Path) -> None:
    (suite / "test_cases.py").write_text(SPARSE.replace("@sparse", "@sparse(nightly=True)"))
    told, closing = closing_lines(suite, "--all", "-p", "no:cacheprovider")
    assert told.endswith("left to make test-nightly: 2 tests (2 of suite)")
    assert "2 passed" in closing


def test_left_is_what_a_run_without_all_has_left(suite: Path) -> None:
    """No case twice, but for those that do more then."""
    (suite / "test_more.py").write_text(MORE)
    told, closing = closing_lines(suite, "--all", "--left", "-p", "no:cacheprovider", "-v")
    assert "4 passed, 3 deselected" in closing
    for name in ("test_case[b]", "test_case[c]", "test_drawn", "test_scaled"):
        assert f"::{name} PASSED" in told


def test_left_to_the_night_is_what_all_has_left(suite: Path) -> None:
    (suite / "test_more.py").write_text(MORE)
    told, closing = closing_lines(suite, "--nightly", "--left", "-p", "no:cacheprovider", "-v")
    assert "1 passed, 6 deselected" in closing
    assert "::test_case[d] PASSED" in told
