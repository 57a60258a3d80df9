"""``s3cache warm`` runs a job until it compiles nothing more, and all is uploaded."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil

from tests.cli.commands import Call
from tests.support.shelves import Shelf
from tests.support.waiting import eventually

# Looks a key up as the compile cache does, then saves it; what follows is up to the test.
LOOKS_UP = """
import os, subprocess, sys, time
import s3cache
from s3cache import frame
from s3cache.records import Record, Recorder
recorder = Recorder(os.environ["S3CACHE_LOCAL_DIR"])
cache = s3cache.Cache.open()
cache.lookup("a1")
recorder.add(Record("aot", "miss", key="a1", reason="absent", time=time.time()))
recorder.add(Record("aot", "hit", key="a2", reason="remote", time=time.time()))
def save():
    cache.save("a1", frame.encode(kind="test", key="a1", sections={"entry": b"x"}))
"""


def test_a_job_that_goes_on_is_ended_when_it_is_warm(
    call: Call, shelf: Shelf, tmp_path: Path
) -> None:
    """With what it has started; not before what missed is saved, and uploaded."""
    alive = tmp_path / "alive"
    job = f"""{LOOKS_UP}
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(alive)!r}, "w").write(str(child.pid))
time.sleep(1.5)  # longer than the quiet time: it compiles
save()
time.sleep(600)
"""
    done = call(
        *("warm", "--url", f"{shelf.url}?create=1", "--quiet", "0.3s", "--json"),
        *("--", sys.executable, "-c", job),
    )
    assert done.code == 0, done.err
    assert done.json == {
        "end": "quiet",
        "exit_code": None,
        "hits": 1,
        "misses": 1,
        "bypasses": 0,
        "added": 1,
        "to_upload": 0,
        "is_warm": True,
    }
    assert {name.rpartition("/")[2] for name in shelf.names} == {"a1.0"}
    eventually(lambda: not is_running(int(alive.read_text())))


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_its_processes_are_one_job_in_reports(call: Call, shelf: Shelf) -> None:
    child = LOOKS_UP + "save(); cache.close(); recorder.close(10)"
    job = f"""
import subprocess, sys
for _ in range(2):
    subprocess.run(["sh", "-c", '"$0" -c "$1" & wait', sys.executable, {child!r}], check=True)
"""
    done = call("warm", "--url", f"{shelf.url}?create=1", "--json", "--", sys.executable, "-c", job)
    assert done.code == 0, done.err
    assert len(call("report", "--json").json["runs"]) == 2


def test_a_job_that_ends_by_itself_says_how(call: Call, shelf: Shelf) -> None:
    job = (sys.executable, "-c", "raise SystemExit(7)")
    done = call("warm", "--url", f"{shelf.url}?create=1", "--", *job)
    assert done.code == 1
    assert "ended by itself with 7" in done.err


def test_a_job_that_compiles_nothing_has_warmed_nothing(call: Call, shelf: Shelf) -> None:
    """A job that hit all its graphs did warm the cache."""
    arguments = ("warm", "--url", f"{shelf.url}?create=1")
    done = call(*arguments, "--", "true")
    assert done.code == 1
    assert "ended by itself\nnothing was compiled, so nothing is warm: " in done.err
    done = call(*arguments, "--json", "--", "true")
    assert (done.code, done.json["is_warm"], done.json["exit_code"]) == (1, False, 0)
    hit = f"{LOOKS_UP}save(); cache.close(); recorder.close(10)"
    done = call(*arguments, "--", sys.executable, "-c", hit)
    assert done.code == 0, done.err
    assert "1 graph hit, 1 missed, of which 1 are in the cache now; 0 bypassed" in done.err
