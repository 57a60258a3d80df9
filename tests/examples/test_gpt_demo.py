"""The demo starts warm where it says so, and would notice if a machine compiled again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.gpt_demo import Report, other_environment, verdict
from tests.support.marks import slow
from tests.support.waiting import LONG_S

ROOT = Path(__file__).resolve().parents[2]


# Four jobs that each import torch, one of which compiles.
@slow
@pytest.mark.timeout(900)
def test_one_machine_compiles_for_all_of_them(tmp_path: Path) -> None:
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("AWS_", "S3CACHE_", "TORCH")) and name != "FORCE_COLOR"
    }
    demo = subprocess.run(
        [sys.executable, "-m", "examples.gpt_demo", "--layers", "1", "--steps", "3"],
        cwd=ROOT,
        env={**clean, "TMPDIR": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert demo.returncode == 0, demo.stdout + demo.stderr
    cells = {
        found[1]: found[2].split()
        for found in re.finditer(r"^(\S.*?) {2,}(\S.*?) *$", demo.stdout, re.MULTILINE)
    }
    assert cells["graphs compiled"] == ["1", "-", "-", "-"]
    assert cells["hits, remote tier"] == ["-", "1", "-", "1"]
    assert cells["hits, local tier"] == ["-", "-", "1", "-"]
    assert cells["losses equal, bit for bit"] == ["3/3"] * 4
    assert "Compiled once" in demo.stdout
    assert list(tmp_path.iterdir()) == []


def test_another_environment_has_the_same_packages_under_another_path(tmp_path: Path) -> None:
    python = other_environment(tmp_path / "venv")
    code = (
        "import msgpack, s3cache; from importlib.util import find_spec; "
        "print(msgpack.__file__, find_spec('torch').origin)"
    )
    done = subprocess.run(
        [python, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=LONG_S
    )
    assert all(path.startswith(f"{tmp_path}/venv/") for path in done.stdout.split())


LOSSES = ["0x1p+2", "0x1p+1"]


def good_reports() -> tuple[Report, dict[str, list[Report]]]:
    first = Report(losses=list(LOSSES), misses=1)
    remote = [Report(losses=list(LOSSES), hits={"remote": 1}) for _ in range(2)]
    return first, {"remote": remote, "local": [Report(losses=list(LOSSES), hits={"local": 1})]}


def test_the_verdict_is_good_where_all_is_as_promised() -> None:
    text, good = verdict(*good_reports(), steps=2)
    assert good
    assert text.startswith("Compiled once")


@pytest.mark.parametrize("tier", ["remote", "local"])
def test_a_machine_that_compiles_again_is_no_success(tier: str) -> None:
    first, others = good_reports()
    others[tier][0].hits, others[tier][0].misses = {}, 1
    assert verdict(first, others, steps=2) == (
        "COMPILED AGAIN: not every graph was found where it had to be.",
        False,
    )


def test_a_hit_in_the_wrong_tier_is_no_success() -> None:
    first, others = good_reports()
    others["remote"][1].hits = {"local": 1}
    assert not verdict(first, others, steps=2)[1]


@pytest.mark.parametrize("losses", [["0x1p+2", "0x1.0000000000001p+1"], ["0x1p+2"]])
def test_another_loss_or_a_missing_one_is_no_success(losses: list[str]) -> None:
    first, others = good_reports()
    others["local"][0].losses = losses
    text, good = verdict(first, others, steps=2)
    assert not good
    assert text.startswith("WRONG")


def test_a_first_machine_that_compiles_nothing_is_no_success() -> None:
    _, others = good_reports()
    assert not verdict(Report(losses=list(LOSSES)), others, steps=2)[1]
