"""Which processes are one job, and how what several of them came to is told once."""

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


def names(runs: list[Run]) -> list[list[str]]:
    return [[each.name for each in job] for job in in_jobs(runs)]


def test_ranks_that_one_launcher_has_started_are_one_job_in_their_order() -> None:
    ranks = [run(str(rank), 100 + rank, at=-rank) for rank in (10, 2, 0)]
    assert names(ranks) == [["100", "102", "110"]]


def test_the_same_job_once_more_is_another_one_and_comes_first() -> None:
    """All that a launcher sets may be equal; a rank that is there already begins anew."""
    first = [run(str(rank), 100 + rank, at=1.0) for rank in range(2)]
    second = [run(str(rank), 200 + rank, at=2.0) for rank in range(2)]
    assert names([*second, *first]) == [["200", "201"], ["100", "101"]]


def test_who_was_started_by_another_launcher_is_of_another_job() -> None:
    assert names([run("0", 100, 1), run("1", 200, 2)]) == [["200"], ["100"]]


def test_what_a_rank_starts_is_of_its_job_though_it_has_its_rank() -> None:
    assert names([run("0", 100), run("1", 101), run("0", 102, 100, at=1)]) == [
        ["100", "102", "101"]
    ]


def test_caches_that_one_process_enables_one_after_the_other_are_one_job() -> None:
    assert names([run("0", 100), run("0", 100, at=1), run("1", 101, at=2)]) == [
        ["100", "100", "101"]
    ]


def test_a_job_that_is_named_holds_all_that_have_the_name() -> None:
    runs = [run("", pid, parent, job="job:x") for pid, parent in ((5, 1), (6, 5), (7, 6), (8, 3))]
    assert names(runs) == [["5", "6", "7", "8"]]


def test_who_is_of_no_job_is_by_itself() -> None:
    assert names([run("", 1, job=""), run("", 2, job="", at=1)]) == [["2"], ["1"]]


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
def test_the_environment_says_of_which_job_a_process_is(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert job_here() == expected


def test_processes_say_of_which_job_they_are(tmp_path: Path) -> None:
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
def test_ranks_are_told_as_people_do(ranks: list[str], expected: str) -> None:
    assert ranks_in_words(run(rank, 50 + i) for i, rank in enumerate(ranks)) == expected


def record(key: str, outcome: str = "miss", **changes: Any) -> Record:
    return Record("aot", outcome, key=key, reason="absent", **changes)


def test_what_several_processes_came_to_is_told_once_as_often_as_it_happened() -> None:
    zero = Run("0", (record("a", elapsed_s=1, saved_s=2), record("a"), record("b")), rank="0")
    one = Run("1", (record("a", elapsed_s=3, saved_s=5), record("b", "hit")), rank="1")
    told = [(each.record.key, each.record.outcome, len(each.runs)) for each in folded([zero, one])]
    assert told == [("a", "miss", 2), ("a", "miss", 1), ("b", "miss", 1), ("b", "hit", 1)]
    first = folded([zero, one])[0]
    assert (first.elapsed_s, first.saved_s) == (3, 7)


def test_what_was_told_otherwise_is_told_by_itself() -> None:
    zero = Run("0", (record("a", rejected=("x is 1",)),), rank="0")
    one = Run("1", (record("a", rejected=("x is 2",)),), rank="1")
    assert len(folded([zero, one])) == 2
