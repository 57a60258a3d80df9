"""``s3cache report``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from s3cache.records import Event, Record
from s3cache.settings import Settings
from s3cache.store import MemoryStore
from tests.cli.commands import Call
from tests.support.caching import entry, open_engine
from tests.support.runs import recalling, record, two_ranks
from tests.support.waiting import eventually


@pytest.fixture
def runs() -> list[str]:
    """Return the names of two recorded runs, the earlier one first."""
    return [record(local(), *run.records) for run in two_ranks()]


def local() -> Path:
    return Path(Settings.load()[0].local_dir)


def test_several_runs_are_counted_together(call: Call, runs: list[str], tmp_path: Path) -> None:
    found = call("report", "--last", "2", "--json").json
    assert found["runs"] == runs
    assert call("report", "--run", runs[0][:-1], "--json").json["runs"] == runs[:1]
    assert (found["hits"], found["misses"], found["bypasses"]) == (2, 2, 1)
    assert (found["hit_rate"], found["spared_s"]) == (0.5, 87)
    assert {"outcome": "miss", "reason": "guard", "count": 1} in found["outcomes"]
    *_, last, more = call("report", "--last", "2").out.splitlines()
    assert last.startswith("50% of lookups hit; 87.0 s of compiling spared")
    assert more == "read on: s3cache explain custom-operator"  # the other misses are expected
    page = tmp_path / "report.html"
    call("report", "--last", "2", "--html", str(page))
    text = page.read_text(encoding="utf-8")
    assert "no entry has been saved" in text
    assert "mine.op has no formula" in text
    for wrong in (("--html", str(tmp_path / "nowhere" / "x.html")), ("--run", "x")):
        assert call("report", *wrong).code == 2


def test_unused_entries_that_a_job_profile_fetched_are_reported(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine looks up one of three graphs that an earlier one saved."""
    monkeypatch.setattr(sys, "argv", [__file__])  # a pytest worker runs no file
    remote, keys = MemoryStore(), [name * 32 for name in ("ab", "cd", "ef")]
    with open_engine(tmp_path / "other", remote, job_profiles=True) as first:
        for key in keys:
            first.save(key, entry(key))
        eventually(lambda: first.parts["job_profile"].is_known)
    with open_engine(local(), remote, job_profiles=True) as second:
        second.start()
        eventually(lambda: second.stats().downloaded == len(keys))
        found = second.lookup(keys[0])
        second.record(Record("aot", "hit", key=keys[0], time=1.0, elapsed_s=found.elapsed_s))
    report = call("report", "--json").json
    assert (report["unused"], report["unused_bytes"]) == (2, 2 * entry(keys[0]).size)
    assert "fetched and not used: 2 entries of" in call("report").out


def test_used_keys_are_written_to_the_manifest(call: Call, tmp_path: Path) -> None:
    """A key was used if it hit or was saved; a miss without a save does not count."""
    outcomes = (("hit", "a1"), ("miss", "a2"), ("miss", "a3"), ("bypass", ""))
    lookups = [Record("aot", outcome, key=key, time=1.0) for outcome, key in outcomes]
    run = record(local(), *lookups, Event("save", 2.0, 0.1, "a2", 10))
    path = tmp_path / "keys"
    call("report", "--manifest", str(path))
    comment, *keys = path.read_text(encoding="utf-8").splitlines()
    assert comment == f"# 2 keys that {run} used"
    assert keys == ["a1", "a2"]


def test_frames_are_reported_if_there_are_any(call: Call, runs: list[str]) -> None:
    assert "frames" not in call("report").out
    (run,) = recalling()
    record(local(), *run.records, *run.events)
    assert "recall: 2 recalled, 1 traced, 1 refused: object" in call("report").out.splitlines()
    assert call("report", "--json").json["features"]["recall"]["recalled"] == 2
