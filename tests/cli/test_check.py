"""``s3cache check`` runs a program, and says what of it can be cached."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest

from s3cache.torch_api import internals
from tests.cli.commands import Call
from tests.support.marks import slow
from tests.support.shelves import Shelf

# Records lookups as the compile cache does: nothing is compiled.
LOOKS_UP = """
import atexit, os, sys, time
from s3cache.records import Record, Recorder
os.makedirs(os.environ["S3CACHE_LOCAL_DIR"], 0o700, exist_ok=True)
recorder = Recorder(os.environ["S3CACHE_LOCAL_DIR"])
atexit.register(recorder.close, 60)
def look_up(outcome, key="", **more):
    recorder.add(Record("aot", outcome, key=key, time=time.time(), **more))
reason = {"code": "function", "message": "calls f", "fix": "vouch for f", "line": "a.py:3: f(x)"}
"""

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
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
compiled = torch.compile(model)
for _ in range(2):
    compiled(torch.ones(2, 4)).sum().backward()
    optimizer.step()
broken(torch.ones(3))
torch._functorch.config.enable_autograd_cache = False
torch.compile(lambda x: x + 1)(torch.ones(3))
open(sys.argv[1], "w").write("to its end")
sys.exit(3)
"""


def program(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(text))
    return path


@slow
@pytest.mark.timeout(300)
def test_each_graph_of_a_program_is_reported_and_nothing_is_left_anywhere(
    call: Call, shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs to its end; what the environment says of a cache is not touched."""
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
    assert found["graphs"][0]["where"] == [str(path), 19, "<module>"]
    assert [each["where"] for each in found["breaks"]] == [f"{path}:12"]
    assert shelf.names == set()
    assert not os.path.exists(tmp_path / "local")


def test_people_get_the_line_and_the_fix(call: Call, tmp_path: Path) -> None:
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
        pytest.param(["--timeout", "15s"], "timeout", marks=slow),
    ],
)
def test_a_program_that_goes_on_is_ended(
    call: Call, tmp_path: Path, arguments: list[str], end: str
) -> None:
    alive = tmp_path / "alive"
    path = program(
        tmp_path,
        f"""{LOOKS_UP}
recorder.note(compiling=True, at=time.time())
look_up("hit", "a1")
recorder.note(compiling=False, at=time.time())
open({str(alive)!r}, "w").write(str(os.getpid()))
time.sleep(600)
""",
    )
    done = call("check", "--json", "--quiet", "0", *arguments, path)
    assert (done.code, done.json["end"], done.json["cacheable"]) == (0, end, True)
    with pytest.raises(ProcessLookupError):
        os.kill(int(alive.read_text()), 0)


def test_it_is_not_ended_while_it_compiles(call: Call, tmp_path: Path) -> None:
    path = program(
        tmp_path,
        f"""{LOOKS_UP}
look_up("hit", "a1")
recorder.note(compiling=True, at=time.time())
time.sleep(1.5)  # longer than the quiet time
look_up("hit", "a2")
""",
    )
    done = call("check", "--json", "--quiet", "0.2s", path)
    assert [graph["key"] for graph in done.json["graphs"]] == ["a1", "a2"]
    assert done.json["end"] == "itself"


def test_with_a_torch_that_is_not_supported_it_runs_nothing(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(internals, "OLDEST", (99, 0))
    path = program(tmp_path, f"open({str(tmp_path / 'ran')!r}, 'w')")
    done = call("check", path)
    assert (done.code, done.out) == (3, "")
    assert "is not supported, so nothing of it is cached" in done.err
    assert not (tmp_path / "ran").exists()
