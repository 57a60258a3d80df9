"""The demos, the example project and the programs on the pages work as the pages say."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import psutil
import pytest
import yaml

from tests.support import machines
from tests.support.marks import cases, nightly, slow
from tests.support.pages import ROOT, files, printed, programs
from tests.support.scripts import python
from tests.support.waiting import LONG_S

PAGE = ROOT / "docs" / "getting-started.md"


def at_home(place: Path) -> dict[str, str]:
    """Return this environment with a home and a temporary directory in ``place``."""
    places = dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME"), str(place))
    return {**os.environ, **places, "FORCE_COLOR": ""}


# Nightly only: tests/equal/kinds checks in every run that a program compiles here and hits
# elsewhere, and make test-dist that `s3cache run` turns the cache on.
@nightly
@pytest.mark.timeout(900)
def test_the_second_machine_hits_and_prints_the_same_losses(tmp_path: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    (tmp_path / "train.py").write_text(files(PAGE)["train.py"], encoding="utf-8")
    commands = re.findall(r"^.*python -m s3cache run --url file:.*$", page, re.MULTILINE)
    assert len(commands) == 2
    environment = at_home(tmp_path)
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    environment["S3CACHE_EXIT_TIMEOUT_S"] = environment["S3CACHE_LOOKUP_TIMEOUT_S"] = "60"
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


# Runs four jobs that import torch; one of them compiles. The test above is a shorter
# check: one job compiles, and one on another machine hits and prints the same losses.
@nightly
@pytest.mark.timeout(900)
def test_one_machine_compiles_for_all_others(tmp_path: Path) -> None:
    environment = at_home(tmp_path)
    clean = {name: each for name, each in environment.items() if not name.startswith("TORCH")}
    demo = python(
        *["-m", "examples.gpt_demo", "--layers", "1", "--steps", "3"],
        env=clean,
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


EXAMPLE = ROOT / "examples" / "warm_start_ci"
# All installed plugins stay on: a user's environment has some too.
ARGUMENTS = ["-q", "-p", "no:cacheprovider"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Copy the example to a directory outside of this repository."""
    return shutil.copytree(EXAMPLE, tmp_path / "project", ignore=shutil.ignore_patterns("__*"))


def run_tests(project: Path) -> subprocess.CompletedProcess[str]:
    return python("-m", "pytest", *ARGUMENTS, cwd=project, timeout_s=550)


# Nightly only: tests/testing/test_plugin.py compares two such machines in each slow run.
@nightly
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


def start_demo(tmp_path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "examples.storage_demo", "--entries", "16"],
        cwd=ROOT,
        env=at_home(tmp_path),
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


# Slow only: tests/faults/test_kill.py kills processes, and looks for lost entries, in every run.
@slow
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


@nightly
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


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

BLOCKS = {
    f"{page.name}-{number}": code for page in PAGES for number, code in enumerate(programs(page))
}
# Those that compile; make test runs the one of the README.
COMPILING = [name for name, code in BLOCKS.items() if "torch" in code]
RUN = """
import contextlib, io, json, runpy, sys
outputs = []
for path in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as written:
        runpy.run_path(path, run_name="__main__")
    outputs.append(written.getvalue().splitlines())
print(json.dumps(outputs))
"""


def test_programs_run_and_print_the_stated_output(tmp_path: Path) -> None:
    """One process runs all that compile nothing."""
    names = [name for name in BLOCKS if name not in COMPILING]
    for name in names:
        (tmp_path / f"{name}.py").write_text(BLOCKS[name])
    files = [str(tmp_path / f"{name}.py") for name in names]
    done = python("-c", RUN, *files, env=at_home(tmp_path), cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    expected = {name: printed(BLOCKS[name]) for name in names}
    assert dict(zip(names, json.loads(done.stdout), strict=True)) == expected
    assert all(expected.values()), "a program must print something"


def run_block(path: str) -> None:
    """Run a program with Python's default warnings."""
    warnings.resetwarnings()
    hidden = DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning
    for category in hidden:
        warnings.simplefilter("ignore", category)
    runpy.run_path(path, run_name="__main__")


@pytest.mark.parametrize("name", cases(COMPILING, slow_ones={*COMPILING} - {"README.md-0"}))
def test_a_program_that_compiles_prints_the_stated_output(name: str, tmp_path: Path) -> None:
    (tmp_path / "block.py").write_text(BLOCKS[name])
    job = f"{__name__}:run_block", str(tmp_path / "block.py")
    done = machines.Machine(tmp_path / "machine").run(*job, server=0)
    assert (done.stderr, done.stdout.splitlines()) == ("", printed(BLOCKS[name])) != ("", [])
