"""A machine is fresh, runs programs as Python does, and reports their outcomes."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from s3cache.stats import Reason, Usage
from s3cache.testing import Machine, ProgramError
from tests.support.marks import slow
from tests.support.waiting import eventually, is_running
from tests.testing import jobs

SHOW = """
import json, os, sys
print(json.dumps({
    "name": __name__,
    "argv": sys.argv,
    "path": sys.path[0],
    "cwd": os.getcwd(),
    "environ": dict(os.environ),
    "home": os.listdir(os.path.expanduser("~")),
    "tmp": os.listdir(os.environ["TMPDIR"]),
}))
"""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "machine", GIVEN="to all")


def script(tmp_path: Path, code: str) -> Path:
    path = tmp_path / "program.py"
    path.write_text(code)
    return path


def test_a_program_runs_on_a_fresh_machine(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program sees no settings of the user who runs the tests, but those of the test."""
    for name in ("AWS_PROFILE", "S3CACHE_URL", "TORCHINDUCTOR_CACHE_DIR", "HTTP_PROXY"):
        monkeypatch.setenv(name, "the developer's own")
    program = script(tmp_path, SHOW)
    outcome = machine.run("program.py", "--x", cwd=tmp_path, environment={"GIVEN_TOO": "to one"})
    found = json.loads(outcome.stdout)
    assert "the developer's own" not in found["environ"].values()
    assert (found["home"], found["tmp"]) == ([".cache"], [])
    places = ("HOME", "TMPDIR", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "S3CACHE_LOCAL_DIR")
    for name in places:
        assert Path(found["environ"][name]).is_relative_to(machine.root), name
    assert (found["environ"]["GIVEN"], found["environ"]["GIVEN_TOO"]) == ("to all", "to one")
    assert (found["name"], found["argv"]) == ("__main__", ["program.py", "--x"])
    assert (found["path"], found["cwd"]) == (str(program.parent), str(tmp_path))


def test_modules_run_as_python_runs_them(machine: Machine, tmp_path: Path) -> None:
    script(tmp_path, SHOW)
    found = json.loads(machine.run("-m", "program", "x", cwd=tmp_path).stdout)
    assert (found["name"], found["argv"][1:]) == ("__main__", ["x"])
    for command in ((), ("-m",), ("-c", "pass"), ("-m", "-x")):
        with pytest.raises(ValueError, match="neither a script nor"):
            machine.run(*command)


@pytest.mark.parametrize(
    ("code", "status", "message"),
    [
        ("import sys; print('last words'); sys.exit(3)", 3, "last words"),
        pytest.param("raise KeyError('wrong')", 1, "KeyError: 'wrong'", marks=slow),
        pytest.param("import os; os.kill(os.getpid(), 9)", -9, "exit status -9", marks=slow),
    ],
)
def test_a_failed_program_raises_an_error_with_its_output(
    machine: Machine, tmp_path: Path, code: str, status: int, message: str
) -> None:
    with pytest.raises(ProgramError, match=message) as caught:
        machine.run(script(tmp_path, code))
    assert caught.value.outcome.exit_code == status


@slow
def test_a_program_that_takes_too_long_is_killed_with_its_children(
    machine: Machine, tmp_path: Path
) -> None:
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(1000)\n"
    )
    with pytest.raises(ProgramError, match="still running after 20 s") as caught:
        machine.run(script(tmp_path, code), timeout_s=20)
    assert caught.value.outcome.exit_code is None
    child = int(caught.value.outcome.stdout)
    # The kernel needs a moment to end the killed process, and init to forget it.
    eventually(lambda: not is_running(child))


# -- functions


def test_a_function_is_called_in_another_process(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its module may be on the path of the test only, because pytest extends that path."""
    first = machine.call(jobs.double, [1, 2], 3).result
    assert first["doubled"] == [3, 6]
    assert first["in"] != os.getpid()
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "only_here.py").write_text("def answer():\n    return 42\n")
    monkeypatch.syspath_prepend(tmp_path / "project")
    assert machine.call("only_here:answer").result == 42


def test_the_error_contains_the_exception_of_a_function(machine: Machine) -> None:
    with pytest.raises(ProgramError, match="not JSON serializable"):
        machine.call(jobs.give_a_set)
    for function in (lambda: None, "no_function", "module:<lambda>"):
        with pytest.raises(ValueError, match="cannot be imported; give"):
            machine.call(function)


@pytest.mark.skipif(find_spec("torch") is None, reason="enable() needs torch")
def test_stats_equal_those_of_the_cache_and_keep_their_types(
    machine: Machine, tmp_path: Path
) -> None:
    stats = machine.call(jobs.use_a_cache, f"file://{tmp_path}/remote?create=1").stats
    assert (stats.saved, stats.uploaded, stats.pending) == (1, 1, 0)
    assert (stats.hits["local"], stats.hits["remote"]) == (1, 0)
    assert dict(stats.misses) == {Reason.ABSENT: 1}
    assert all(type(reason) is Reason for reason in stats.misses)
    assert isinstance(stats.local, Usage)
    assert stats.local.files == stats.remote["put"].calls == stats.hit_latency["local"].count == 1


def test_a_machine_keeps_its_files_and_has_no_stats_without_a_cache(
    machine: Machine, tmp_path: Path
) -> None:
    code = "import pathlib, s3cache\nleft = pathlib.Path.home() / 'left'\n"
    program = script(tmp_path, f"{code}print(left.exists())\nleft.touch()\n")
    outcomes = [machine.run(program) for _ in range(2)]
    assert [each.stdout for each in outcomes] == ["False\n", "True\n"]
    # It has no stats, instead of stats without misses.
    with pytest.raises(AssertionError, match="there was no cache"):
        _ = outcomes[0].stats
