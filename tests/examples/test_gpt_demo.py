"""The demo starts warm as it says."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.support.marks import nightly
from tests.support.pages import ROOT
from tests.support.scripts import python


# Runs four jobs that import torch; one of them compiles. test_getting_started.py has a shorter
# check: one job compiles, and one on another machine hits and prints the same losses.
@nightly
@pytest.mark.timeout(900)
def test_one_machine_compiles_for_all_others(tmp_path: Path) -> None:
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("AWS_", "TORCH")) and name != "FORCE_COLOR"
    }
    demo = python(
        *["-m", "examples.gpt_demo", "--layers", "1", "--steps", "3"],
        env={**clean, "TMPDIR": str(tmp_path), "HOME": str(tmp_path)},
        cwd=ROOT,
        timeout_s=800,
    )
    assert demo.returncode == 0, demo.stdout + demo.stderr
    cells = {
        found[1]: found[2].split()
        for found in re.finditer(r"^(\S.*?) {2,}(\S.*?) *$", demo.stdout, re.MULTILINE)
    }
    assert cells["graphs compiled"] == ["1", "-", "-", "-"]
    assert cells["graphs hit"] == ["-", "1", "1", "1"]
    frames = re.findall(r"\d+ / \d+", demo.stdout)
    assert frames == ["0 / 1", "1 / 0", "1 / 0", "1 / 0"]
    assert cells["losses equal, bit for bit"] == ["3/3"] * 4
    assert "Compiled once" in demo.stdout
    assert list(tmp_path.iterdir()) == []
