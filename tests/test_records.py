"""Records of lookups are written soon, private, bounded, readable, and grouped by job."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from s3cache.records import (
    Event,
    Record,
    Recorder,
    Run,
    folded,
    in_jobs,
    job_here,
    processes_in_words,
    read_run,
    run_names,
)
from s3cache.seam import launch
from s3cache.stats import Step, TransferEvent
from tests.support.hanging import FreezableDisk
from tests.support.runs import record
from tests.support.waiting import LONG_S, eventually

COMPONENTS = {"torch.version": ("d1", "2.12.1")}
PLACE = ("train.py", 7, "main")
MISS = Record("aot", "miss", "a" * 65, "absent", 5.0, 0.25, where=PLACE, components=COMPONENTS)
WHY = {"code": "function", "message": "calls mine", "line": "model.py:3: mine(x)"}
BYPASS = Record("aot", "bypass", reason="function", reasons=(WHY,))


def test_lookups_and_events_are_read_as_written(tmp_path: Path) -> None:
    events = (Event("download", 3.0, 0.5, "name", 7), Event("compile", 4.0, 2.0, "key"))
    run = read_run(str(tmp_path), record(tmp_path, events[0], MISS, events[1], BYPASS))
    assert (run.records, run.events) == ((MISS, BYPASS), events)
    assert run.complete
    assert run.program == sys.argv[0]


def test_events_alone_write_no_file_and_do_not_displace_lookups(tmp_path: Path) -> None:
    events = [Event("download", 3.0, 0.5)] * 600
    record(tmp_path, *events)
    assert list(tmp_path.iterdir()) == run_names(str(tmp_path)) == []
    run = read_run(str(tmp_path), record(tmp_path, *events, MISS, BYPASS))
    assert run.records == (MISS, BYPASS)
    assert len(run.events) < 600


def test_a_transfer_is_one_event_from_its_last_start_to_its_end(tmp_path: Path) -> None:
    recorder = Recorder(str(tmp_path))
    for name, steps in {
        "a": ("queued", "started", "retried", "started", "done"),
        "b": ("started", "absent"),
        "c": ("started",),
        "d": ("done",),
    }.items():
        for step in steps:
            recorder.record_transfer(TransferEvent("download", cast("Step", step), name, 5))
    recorder.add(MISS)
    recorder.close(LONG_S)
    events = read_run(str(tmp_path), recorder.run).events
    assert [(each.name, each.ended) for each in events] == [("a", "done"), ("b", "absent")]
    assert {(each.event, each.size, each.elapsed_s >= 0) for each in events} == {
        ("download", 5, True)
    }


def test_only_this_user_can_read_records(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        name = record(tmp_path, MISS)
    finally:
        os.umask(before)
    file = tmp_path / "records" / f"{name}.jsonl"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_the_last_lookups_are_held_in_memory_without_a_directory() -> None:
    recorder = Recorder(None)
    recorder.add(MISS)
    recorder.close(LONG_S)
    recorder.add(BYPASS)
    assert recorder.held() == (MISS, BYPASS)
    for _ in range(10_000):
        recorder.add(MISS)
    assert len(recorder.held()) == 512


def test_a_file_is_bounded_and_marked_incomplete(tmp_path: Path) -> None:
    run = read_run(str(tmp_path), record(tmp_path, *[MISS] * 50, run_bytes=700))
    assert 1 <= len(run.records) <= 3
    assert not run.complete


@pytest.mark.parametrize(
    ("limits", "kept"),
    [({"runs": 3}, ["04", "03"]), ({"run_bytes": 1000, "all_bytes": 1900}, ["04"])],
)
def test_the_oldest_runs_are_removed(
    tmp_path: Path, limits: dict[str, int], kept: list[str]
) -> None:
    old = tmp_path / "records"
    old.mkdir(mode=0o700)
    for second in range(5):
        (old / f"20200101-00000{second}-1-aaaa.jsonl").write_bytes(b"x" * 600)
    name = record(tmp_path, MISS, **limits)
    assert run_names(str(tmp_path)) == [name, *(f"20200101-0000{each}-1-aaaa" for each in kept)]


def test_records_are_soon_on_the_disk(tmp_path: Path) -> None:
    """So a process that is killed loses only its last ones."""
    root, recorder = str(tmp_path), Recorder(str(tmp_path))
    recorder.add(MISS)
    eventually(lambda: any(read_run(root, name).records == (MISS,) for name in run_names(root)))
    recorder.close(LONG_S)


def test_a_damaged_line_is_left_out(tmp_path: Path) -> None:
    name = record(tmp_path, MISS)
    file = tmp_path / "records" / f"{name}.jsonl"
    bad = [b"{", b"[]", b"7", b'{"outcome": "miss"}', b'{"outcome": "hit"']
    file.write_bytes(file.read_bytes() + b"\n".join(bad))
    assert read_run(str(tmp_path), name).records == (MISS,)


def test_no_records_are_written_to_a_directory_that_others_may_write(tmp_path: Path) -> None:
    (tmp_path / "records").mkdir()
    (tmp_path / "records").chmod(0o777)
    record(tmp_path, MISS)
    assert list((tmp_path / "records").iterdir()) == []


def test_a_disk_that_hangs_does_not_block_lookups(tmp_path: Path) -> None:
    """It does not block the end of the program either; the queue of lookups is bounded."""
    with FreezableDisk.mounted(tmp_path) as disk:
        place = str(disk.path)
        recorder = Recorder(place)
        with disk.frozen():
            for _ in range(2000):
                recorder.add(MISS)
            recorder.close(0.1)  # the thread cannot be killed, so a wait for it would hang
        eventually(lambda: any(read_run(place, name).records for name in run_names(place)))
        (name,) = run_names(place)
        assert len(read_run(place, name).records) < 600


# -- jobs


JOB = "launcher:none 0 localhost 29500"


def run(number: str, pid: int, parent: int = 1, *, at: float = 0.0, job: str = JOB) -> Run:
    process = f"rank {number}" if number else ""
    return Run(f"{pid}", (), "train.py", at, process, job=job, pid=pid, parent=parent)


@pytest.mark.parametrize(
    ("runs", "jobs"),
    [
        # Ranks of one launcher are one job, in the order of ranks.
        ([run(str(rank), 100 + rank, at=-rank) for rank in (10, 2, 0)], [["100", "102", "110"]]),
        # A second run of the same job is another job with an equal environment, and comes first.
        ([run(str(rank), pid + rank, at=pid) for pid in (200, 100) for rank in (0, 1)],
         [["200", "201"], ["100", "101"]]),
        ([run("0", 100, 1), run("1", 200, 2)], [["200"], ["100"]]),  # two launchers
        # A child process of a rank belongs to the same job, although it has the same rank.
        ([run("0", 100), run("1", 101), run("0", 102, 100, at=1)], [["100", "102", "101"]]),
        # One process may enable several caches.
        ([run("0", 100), run("0", 100, at=1), run("1", 101, at=2)], [["100", "100", "101"]]),
        # A job with a name has all processes of that name.
        ([run("", pid, parent, job="job:x") for pid, parent in ((5, 1), (6, 5), (7, 6), (8, 3))],
         [["5", "6", "7", "8"]]),
        ([run("", 1, job=""), run("", 2, job="", at=1)], [["2"], ["1"]]),  # no job
    ],
    ids=["launcher", "again", "launchers", "children", "caches", "name", "none"],
)  # fmt: skip
def test_processes_are_grouped_by_job(runs: list[Run], jobs: list[list[str]]) -> None:
    assert [[each.name for each in job] for job in in_jobs(runs)] == jobs


def test_a_head_has_the_job_of_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S3CACHE_JOB", "nightly-7")
    head = read_run(str(tmp_path), record(tmp_path, MISS), max_lines=1)
    here = ("job:nightly-7", os.getpid(), os.getppid(), ())
    assert (head.job, head.pid, head.parent, head.records) == here
    monkeypatch.delenv("S3CACHE_JOB")
    monkeypatch.delenv("RANK", raising=False)
    assert job_here() == launch().name == ""


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        *((["0"], "rank 0"), (["0", "1", "2"], "ranks 0-2"), ([""], "process 50")),
        (["10", "2", "3", "7"], "ranks 2-3, 7, 10"),
        (["1", "", ""], "rank 1, processes 51, 52"),
        (["main"], "process main"),
    ],
)
def test_processes_in_words(numbers: list[str], expected: str) -> None:
    assert processes_in_words(run(it, 50 + i) for i, it in enumerate(numbers)) == expected


def of(key: str, outcome: str = "miss", **changes: Any) -> Record:
    return Record("aot", outcome, key=key, reason="absent", **changes)


def test_equal_lookups_of_several_processes_are_folded() -> None:
    """Each group has the number of its lookups. Lookups with different details stay separate."""
    zero = Run("0", (of("a", elapsed_s=1, saved_s=2), of("a"), of("b")), process="rank 0")
    one = Run("1", (of("a", elapsed_s=3, saved_s=5), of("b", "hit")), process="rank 1")
    lookups = folded([zero, one])
    assert [(record.key, record.outcome, len(runs)) for record, runs in lookups] == [
        *(("a", "miss", 2), ("a", "miss", 1), ("b", "miss", 1), ("b", "hit", 1))
    ]
    assert (lookups[0][0].elapsed_s, lookups[0][0].saved_s) == (3, 7)
    rejecting = [Run(why, (of("a", rejected=(why,)),)) for why in ("x is 1", "x is 2")]
    assert len(folded(rejecting)) == 2
