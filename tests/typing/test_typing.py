"""The public names are typed: programs of users pass ``mypy --strict``, and mistakes do not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.marks import slow
from tests.support.pages import ROOT, programs

HERE = Path(__file__).parent


@slow
@pytest.mark.timeout(900)  # the first time mypy reads torch, too
def test_programs_pass_and_a_misspelt_setting_does_not(tmp_path: Path) -> None:
    """``accepted.py`` and ``rejected.py`` hold; the README's first program does, until a typo."""
    program = programs(ROOT / "README.md")[0]
    wrong = program.replace('"memory://example")', '"memory://example", strikt=True)')
    assert wrong != program
    (tmp_path / "readme.py").write_text(program, encoding="utf-8")
    (tmp_path / "misspelt.py").write_text(wrong, encoding="utf-8")
    files = [HERE / "accepted.py", HERE / "rejected.py"]
    files += [tmp_path / "readme.py", tmp_path / "misspelt.py"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", *files],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.stderr == ""
    errors = [line for line in done.stdout.splitlines() if " error: " in line]
    assert len(errors) == 1, done.stdout
    assert "misspelt.py:3: error: " in errors[0]
    assert 'Unexpected keyword argument "strikt" for "enable"' in errors[0]
