"""The demo starts warm as it says, and notices if a machine compiles again."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from examples.gpt_demo import Report, verdict
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


LOSSES = ["0x1p+2", "0x1p+1"]
REMOTE, LOCAL = {"remote": 1}, {"local": 1}
AHEAD = {"local": 1, "remote": 0}  # fetched before the lookup


def report(
    losses: list[str] = LOSSES,
    misses: int = 0,
    hits: dict[str, int] | None = None,
    traced: int | None = None,
) -> Report:
    """Return the report of a job that traced its misses and recalled its hits."""
    found = dict(hits or {})
    traced = misses if traced is None else traced
    recalled = sum(found.values()) - traced if found else 0
    downloaded = 0 if found == LOCAL else 1
    return Report(
        losses=list(losses),
        misses=misses,
        hits=found,
        recalled=recalled,
        traced=traced,
        downloaded_bytes=downloaded,
    )


@pytest.mark.parametrize(
    ("first", "remote", "local", "expected"),
    [
        (report(misses=1), report(hits=REMOTE), report(hits=LOCAL), "Compiled once"),
        (report(misses=1), report(hits=AHEAD), report(hits=LOCAL), "Compiled once"),
        (report(misses=1), report(misses=1), report(hits=LOCAL), "COMPILED AGAIN"),
        (report(misses=1), report(hits=REMOTE), report(hits=REMOTE), "COMPILED AGAIN"),
        (report(misses=1), report(hits=LOCAL), report(hits=LOCAL), "COMPILED AGAIN"),
        (report(misses=1), report(hits=REMOTE), report(["0x1p+2", "0x1.01p+1"], 0, LOCAL), "WRONG"),
        (report(misses=1), report(hits=REMOTE), report(hits=LOCAL, traced=1), "TRACED AGAIN"),
        (report(), report(hits=REMOTE), report(hits=LOCAL), ""),
    ],
)
def test_the_verdict_is_good_only_if_one_machine_compiled(
    first: Report, remote: Report, local: Report, expected: str
) -> None:
    others = {"bucket": [report(hits=REMOTE), remote], "disk": [local]}
    text, good = verdict(first, others, steps=2)
    assert text.startswith(expected)
    assert good == (expected == "Compiled once")
