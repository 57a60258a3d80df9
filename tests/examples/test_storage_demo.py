"""The demo works as it says, and leaves no files or processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from tests.support.marks import slow
from tests.support.pages import ROOT
from tests.support.waiting import LONG_S


def start_demo(tmp_path: Path) -> subprocess.Popen[str]:
    clean = {name: value for name, value in os.environ.items() if name != "FORCE_COLOR"}
    return subprocess.Popen(
        [sys.executable, "-m", "examples.storage_demo", "--entries", "16"],
        cwd=ROOT,
        env={**clean, "TMPDIR": str(tmp_path), "HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def processes_in(tmp_path: Path) -> list[psutil.Process]:
    """Return all processes with a temporary directory below ``tmp_path``."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR", "").startswith(str(tmp_path)):
                found.append(process)
        except (psutil.AccessDenied, psutil.NoSuchProcess):
            continue
    return found


def numbers(output: str, row: str) -> list[int]:
    """Return the cells of one row of the final table."""
    (line,) = (line for line in output.splitlines() if line.startswith(row + " "))
    return [0 if cell == "-" else int(cell) for cell in line.removeprefix(row).split()]


def test_no_acknowledged_entry_is_lost_and_no_file_is_left(tmp_path: Path) -> None:
    demo = start_demo(tmp_path)
    output, _ = demo.communicate(timeout=LONG_S)
    assert demo.returncode == 0, output
    assert "Nothing acknowledged was lost: machine B has all 16 entries" in output
    killed, resumed, fresh = numbers(output, "entries saved and acknowledged")
    assert killed >= 8
    assert killed + resumed >= 16
    assert fresh == 0
    uploaded_before, uploaded_after, _ = numbers(output, "uploads finished")
    assert uploaded_before < killed, "no upload was pending at the kill"
    assert uploaded_after >= killed - uploaded_before
    assert sum(numbers(output, "hits, local tier")[2:] + numbers(output, "hits, remote tier")) == 16
    assert re.findall(r"[^ -~\n]", output) == [], "control characters only on a terminal"
    assert list(tmp_path.iterdir()) == []
    assert processes_in(tmp_path) == []


@slow
def test_ctrl_c_cleans_up(tmp_path: Path) -> None:
    demo = start_demo(tmp_path)
    assert demo.stdout is not None
    for line in demo.stdout:
        if "is started again" in line:  # by now a server runs, and two machines have files
            break
    demo.send_signal(signal.SIGINT)
    output, _ = demo.communicate(timeout=LONG_S)
    assert demo.returncode == 130, output
    assert list(tmp_path.iterdir()) == []
    assert processes_in(tmp_path) == []
