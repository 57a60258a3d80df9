"""A process that a launcher has started is known by its job and its rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from s3cache.records import Record, job_here, read_run
from tests.support.runs import record

VARIABLES = "RANK MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"MASTER_PORT": "1"}, ""),
        ({"RANK": "3", "S3CACHE_JOB": "nightly-7"}, "job:nightly-7"),
        ({"RANK": "3", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "launcher:  a 1"),
        ({"RANK": "3", "TORCHELASTIC_RUN_ID": "x", "MASTER_PORT": "1"}, "launcher:x   1"),
    ],
)
def test_the_environment_names_the_job_of_a_process(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str
) -> None:
    for name in VARIABLES.split():
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert job_here() == expected


def test_a_head_has_the_rank_and_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("S3CACHE_JOB", "nightly-7")
    head = read_run(str(tmp_path), record(tmp_path, Record("aot", "miss", "a" * 65)), max_lines=1)
    assert (head.process, head.job) == ("rank 3", "job:nightly-7")
