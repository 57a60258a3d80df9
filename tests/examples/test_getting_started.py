"""The program of docs/getting-started.md works on two machines as the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.marks import slow
from tests.support.pages import ROOT, files

PAGE = ROOT / "docs" / "getting-started.md"


# Slow only: tests/equal/kinds checks in every run that a program compiles here and hits elsewhere.
@slow
@pytest.mark.timeout(900)
def test_the_second_machine_hits_and_prints_the_same_losses(tmp_path: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    (tmp_path / "train.py").write_text(files(PAGE)["train.py"], encoding="utf-8")
    commands = re.findall(r"^.*python -m s3cache run --url file:.*$", page, re.MULTILINE)
    assert len(commands) == 2
    environment = dict(os.environ)
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    environment["S3CACHE_EXIT_TIMEOUT_S"] = environment["S3CACHE_LOOKUP_TIMEOUT_S"] = "60"
    for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME"):
        environment[name] = str(tmp_path)
    runs = [
        subprocess.run(
            ["bash", "-ec", command.replace("/tmp/s3cache-try", f"{tmp_path}/try")],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=400,
            check=True,
        )
        for command in commands
    ]
    assert runs[0].stdout == runs[1].stdout
    assert runs[0].stdout.count("loss") == 3
    for run, expected in zip(runs, re.findall(r"`(\d hit.*?)`", page), strict=True):
        assert expected in run.stderr, run.stderr
    assert ", 0 missed" in runs[1].stderr, runs[1].stderr
