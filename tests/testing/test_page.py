"""The files on docs/testing.md are those of the example, and tests that pass."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.marks import slow
from tests.support.pages import ROOT, files

FILES = files(ROOT / "docs" / "testing.md")
EXAMPLE = ROOT / "examples" / "warm_start_ci"


def test_the_warm_start_is_that_of_the_example() -> None:
    name = "tests/test_warm_start.py"
    assert FILES[name] == (EXAMPLE / name).read_text(encoding="utf-8")
    assert set(FILES) == {name, "test_my_store.py"}


def test_the_store_is_held_to_the_contract(tmp_path: Path) -> None:
    """A part of it: ``tests/contract`` has all of it, for the same store."""
    (tmp_path / "test_my_store.py").write_text(FILES["test_my_store.py"], encoding="utf-8")
    chosen = "test_round_trip or lies_there or disturbs_nothing"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " skipped" not in done.stdout
    assert int(done.stdout.split(" passed")[0].split()[-1]) == 9


@slow
@pytest.mark.timeout(900)  # mypy reads torch, too, where it has not yet
def test_what_it_shows_passes_mypy_strict(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / Path(name).name).write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", *map(str, tmp_path.glob("*.py"))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
