"""Processes are grouped by job, and equal lookups of several processes are folded into one."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from s3cache.records import (
    Record,
    Run,
    folded,
    in_jobs,
    job_here,
    ranks_in_words,
    read_head,
    run_names,
)
from tests.support.waiting import LONG_S

if TYPE_CHECKING:
    from pathlib import Path

JOB = "ranks:none 0 localhost 29500"
VARIABLES = (
    "S3CACHE_JOB",
    "RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
)


def run(rank: str, pid: int, parent: int = 1, *, at: float = 0.0, job: str = JOB) -> Run:
    return Run(f"{pid}", (), "train.py", at, rank, job=job, pid=pid, parent=parent)


@pytest.mark.parametrize(
    ("runs", "jobs"),
    [
        # Ranks of one launcher are one job, by rank.
        ([run(str(rank), 100 + rank, at=-rank) for rank in (10, 2, 0)], [["100", "102", "110"]]),
        # The same job again is another one, though its environment is equal, and comes first.
        ([run(str(rank), pid + rank, at=pid) for pid in (200, 100) for rank in (0, 1)],
         [["200", "201"], ["100", "101"]]),
        ([run("0", 100, 1), run("1", 200, 2)], [["200"], ["100"]]),  # two launchers
        # A process that a rank starts is of its job, though it has its rank.
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


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ""),
        ({"MASTER_PORT": "1"}, ""),
        ({"RANK": "3", "S3CACHE_JOB": "nightly-7"}, "job:nightly-7"),
        ({"RANK": "3", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "ranks:  a 1"),
        (
            {
                "RANK": "3",
                "MASTER_ADDR": "a",
                "MASTER_PORT": "1",
                "TORCHELASTIC_RUN_ID": "x",
                "TORCHELASTIC_RESTART_COUNT": "2",
            },
            "ranks:x 2 a 1",
        ),
    ],
)
def test_the_environment_names_the_job_of_a_process(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert job_here() == expected


def test_processes_record_their_job(tmp_path: Path) -> None:
    code = (
        "from s3cache.records import Record, Recorder\n"
        f"r = Recorder({str(tmp_path)!r}); r.add(Record('aot', 'miss', key='a')); r.close(60)"
    )
    clean = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    for job in range(2):
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", code],
                env={**clean, "RANK": str(rank), "MASTER_PORT": "29500"},
            )
            for rank in range(2)
        ]
        for process in ranks:
            assert process.wait(LONG_S) == 0
        assert len(run_names(str(tmp_path))) == 2 * job + 2
    jobs = in_jobs(read_head(str(tmp_path), name) for name in run_names(str(tmp_path)))
    assert [[each.rank for each in job] for job in jobs] == [["0", "1"]] * 2
    assert max(each.started for each in jobs[1]) < min(each.started for each in jobs[0])


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (["0"], "rank 0"),
        (["0", "1", "2"], "ranks 0-2"),
        (["10", "2", "3", "7"], "ranks 2-3, 7, 10"),
        ([""], "process 50"),
        (["1", "", ""], "rank 1, processes 51, 52"),
        (["main"], "process main"),
    ],
)
def test_ranks_in_words(ranks: list[str], expected: str) -> None:
    assert ranks_in_words(run(rank, 50 + i) for i, rank in enumerate(ranks)) == expected


def record(key: str, outcome: str = "miss", **changes: Any) -> Record:
    return Record("aot", outcome, key=key, reason="absent", **changes)


def test_equal_lookups_of_several_processes_are_folded() -> None:
    """As often as each happened; with different details they stay apart."""
    zero = Run("0", (record("a", elapsed_s=1, saved_s=2), record("a"), record("b")), rank="0")
    one = Run("1", (record("a", elapsed_s=3, saved_s=5), record("b", "hit")), rank="1")
    found = folded([zero, one])
    assert [(each.record.key, each.record.outcome, len(each.runs)) for each in found] == [
        ("a", "miss", 2),
        ("a", "miss", 1),
        ("b", "miss", 1),
        ("b", "hit", 1),
    ]
    assert (found[0].elapsed_s, found[0].saved_s) == (3, 7)
    rejecting = [Run(why, (record("a", rejected=(why,)),)) for why in ("x is 1", "x is 2")]
    assert len(folded(rejecting)) == 2
