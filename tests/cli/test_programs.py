"""``s3cache check`` and ``warm`` run a program, follow its records, and end it in time."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from s3cache.torch_api import internals
from tests.cli.commands import Call
from tests.support.marks import nightly, slow
from tests.support.shelves import Shelf
from tests.support.waiting import eventually, is_running

# Records lookups as the compile cache does, but compiles nothing.
LOOKS_UP = """
import atexit, os, subprocess, sys, time
import s3cache
from s3cache import frame
from s3cache.records import Event, Record, Recorder
os.makedirs(os.environ["S3CACHE_LOCAL_DIR"], 0o700, exist_ok=True)
recorder = Recorder(os.environ["S3CACHE_LOCAL_DIR"])
atexit.register(recorder.close, 60)
def look_up(outcome, key="", kind="aot", **more):
    recorder.add(Record(kind, outcome, key=key, time=time.time(), **more))
def save(key):
    with s3cache.Cache.open() as cache:
        cache.lookup(key)
        cache.save(key, frame.encode(kind="test", key=key, sections={"entry": b"x"}))
    recorder.add(Event("save", time.time(), name=key))
reason = {"code": "function", "message": "calls f", "fix": "vouch for f", "line": "a.py:3: f(x)"}
"""


def program(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "program.py"
    path.write_text(text)
    return path


# -- check


PROGRAM = """
import sys
import torch

@torch._dynamo.allow_in_graph
def own(x):
    return x.cos()

@torch.compile
def broken(x):
    y = torch.sin(x)
    torch._dynamo.graph_break()
    return y * own(x)

model = torch.nn.Linear(4, 4)
torch.compile(model)(torch.ones(2, 4)).sum().backward()
broken(torch.ones(3))
torch._functorch.config.enable_autograd_cache = False
torch.compile(lambda x: x + 1)(torch.ones(3))
open(sys.argv[1], "w").write("to its end")
sys.exit(3)
"""


@slow
@pytest.mark.timeout(300)
def test_check_reports_each_graph_and_leaves_no_files(
    call: Call, shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program runs to its end; the cache in the environment is not touched."""
    monkeypatch.setenv("S3CACHE_URL", f"{shelf.url}?create=1")
    monkeypatch.setenv("S3CACHE_STRICT", "1")
    path = program(tmp_path, PROGRAM)
    done = call("check", "--json", path, tmp_path / "end")
    assert done.code == 1
    found = done.json
    assert (found["end"], found["exit_code"]) == ("itself", 3)
    assert (tmp_path / "end").read_text() == "to its end"
    verdicts = [
        (graph["cacheable"], graph["in_halves"], bool(graph["key"])) for graph in found["graphs"]
    ]
    good, bad, off = (True, False, True), (False, True, False), (False, False, False)
    assert verdicts == [good, good, bad, off]
    (reason,) = found["graphs"][2]["reasons"]
    assert reason["code"] == "function"
    assert reason["line"] == f"{path}:13: return y * own(x)"
    assert "register_cacheable" in reason["fix"]
    assert [each["code"] for each in found["graphs"][3]["reasons"]] == ["caches-off"]
    assert found["graphs"][0]["where"] == [str(path), 16, "<module>"]
    assert [each["where"] for each in found["breaks"]] == [f"{path}:12"]
    assert shelf.names == set()
    assert not os.path.exists(tmp_path / "local")


def test_check_prints_the_line_and_the_fix(call: Call, tmp_path: Path) -> None:
    path = program(
        tmp_path,
        f"""{LOOKS_UP}
look_up("miss", "a" * 65, where=("train.py", 7, "step"))
look_up("hit", "a" * 65, where=("train.py", 7, "step"))
look_up("bypass", where=("train.py", 8, "step"), reasons=(reason,))
look_up("miss", "b" * 65)
look_up("bypass", "b" * 65, reasons=({{"code": "entry", "message": "cannot be pickled"}},))
""",
    )
    done = call("check", path)
    assert done.code == 1
    assert done.out.splitlines() == [
        "1 of 3 graphs can be cached",
        f"graph 0: train.py:7 in step, 2 times, cached at the first level, key {'a' * 65}",
        "graph 1: train.py:8 in step, cached at the second level only (function)",
        "  a.py:3: f(x): calls f [function]",
        "    fix: vouch for f",
        "graph 2: cached at the second level only (entry)",
        "  cannot be pickled [entry]",
        "read on: s3cache explain function entry",
    ]
    assert "ended by itself" in done.err


@pytest.mark.parametrize(
    ("arguments", "end"),
    [
        (["--quiet", "0.2s"], "quiet"),
        pytest.param(["--quiet", "0", "--graphs", "2"], "graphs", marks=slow),
        pytest.param(["--quiet", "0", "--timeout", "15s"], "timeout", marks=nightly),
    ],
)
def test_check_ends_a_long_program_but_not_while_it_compiles(
    call: Call, tmp_path: Path, arguments: list[str], end: str
) -> None:
    path = program(
        tmp_path,
        f"""{LOOKS_UP}
look_up("hit", "a1")
recorder.add(dict(compiling=True, at=time.time()))
time.sleep(1.5)  # longer than the quiet time
look_up("hit", "a2")
recorder.add(dict(compiling=False, at=time.time()))
open({str(tmp_path / "alive")!r}, "w").write(str(os.getpid()))
time.sleep(600)
""",
    )
    done = call("check", "--json", *arguments, path)
    assert (done.code, done.json["end"]) == (0, end)
    assert [graph["key"] for graph in done.json["graphs"]] == ["a1", "a2"]
    assert not is_running(int((tmp_path / "alive").read_text()))


@slow
def test_check_ends_if_a_process_was_killed_while_it_compiled(call: Call, tmp_path: Path) -> None:
    job = f"""{LOOKS_UP}
if len(sys.argv) == 1:
    subprocess.run([sys.executable, sys.argv[0], "compiles"])
    time.sleep(600)
look_up("miss", "a1")
recorder.add(dict(compiling=True, at=time.time()))
recorder.close(60)
os.kill(os.getpid(), 9)
"""
    done = call("check", "--json", "--quiet", "0.2s", program(tmp_path, job))
    assert (done.code, done.json["end"]) == (0, "quiet")


def test_check_runs_nothing_with_an_unsupported_torch(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(internals, "OLDEST", (99, 0))
    done = call("check", program(tmp_path, f"open({str(tmp_path / 'ran')!r}, 'w')"))
    assert (done.code, done.out) == (3, "")
    assert "is not supported, so nothing is cached" in done.err
    assert not (tmp_path / "ran").exists()


# -- warm


@pytest.mark.parametrize("kind", ["aot", "fx"])
def test_warm_ends_a_long_job_once_its_graphs_are_cached(
    call: Call, shelf: Shelf, tmp_path: Path, kind: str
) -> None:
    """Its children end too, but not before all misses are saved and uploaded.

    Graphs that are not cached as a whole miss at the second level.
    """
    alive = tmp_path / "alive"
    job = f"""{LOOKS_UP}
look_up("miss", "a1", {kind!r}, reason="absent")
look_up("miss", "a3", "fx", reason="absent", of_whole=True)
look_up("hit", "a2", reason="remote")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(alive)!r}, "w").write(str(child.pid))
time.sleep(1.5)  # longer than the quiet time: it compiles
save("a1")
time.sleep(600)
"""
    done = call(
        *("warm", "--url", f"{shelf.url}?create=1", "--quiet", "0.3s", "--json"),
        *("--", sys.executable, "-c", job),
    )
    assert done.code == 0, done.err
    counts = {"hits": 1, "misses": 1, "bypasses": 0, "added": 1, "to_upload": 0}
    assert done.json == {"end": "quiet", "exit_code": None, **counts, "is_warm": True}
    assert {name.rpartition("/")[2] for name in shelf.names} == {"a1.0"}
    eventually(lambda: not is_running(int(alive.read_text())))


def test_the_processes_of_a_warmed_job_are_reported_together(call: Call, shelf: Shelf) -> None:
    child = LOOKS_UP + "look_up('hit', 'a2')"
    job = f"""
import subprocess, sys
for _ in range(2):
    subprocess.run(["sh", "-c", '"$0" -c "$1" & wait', sys.executable, {child!r}], check=True)
"""
    done = call("warm", "--url", f"{shelf.url}?create=1", "--json", "--", sys.executable, "-c", job)
    assert done.code == 0, done.err
    assert len(call("report", "--json").json["runs"]) == 2


@pytest.mark.parametrize(
    ("job", "code", "message"),
    [
        pytest.param("raise SystemExit(7)", 1, "ended by itself with 7", marks=slow),
        ("", 1, "ended by itself\nnothing was compiled, so nothing is warm: "),
        (
            f"{LOOKS_UP}look_up('hit', 'a2'); look_up('miss', 'a1'); save('a1')",
            0,
            "1 graph hit, 1 missed, of which 1 are in the cache now; 0 bypassed",
        ),
    ],
)
def test_warm_reports_how_a_job_ended_by_itself(
    call: Call, shelf: Shelf, job: str, code: int, message: str
) -> None:
    """A job that compiled nothing has warmed nothing."""
    done = call("warm", "--url", f"{shelf.url}?create=1", "--", sys.executable, "-c", job)
    assert done.code == code, done.err
    assert message in done.err
