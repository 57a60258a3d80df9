"""Restarts of a job agree, and from the third on trace nothing that could have been recalled."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.features.recall.restarts import JOBS, restart_all
from tests.support.marks import nightly, slow


@pytest.mark.timeout(14_400)  # for hangs
@pytest.mark.parametrize(
    ("words", "restarts"),
    [
        pytest.param(("configuration", "break"), 5, marks=slow),
        pytest.param(("",), 500, marks=nightly),
    ],
)
def test_no_restart_disagrees_or_traces_in_vain(
    words: tuple[str, ...], restarts: int, tmp_path: Path
) -> None:
    jobs = [job for job in JOBS if any(word in job.name for word in words)]
    found = [*restart_all(jobs, tmp_path, restarts, at_once=2)]
    assert [fault for _, done in found for fault in done.wrong] == []
    assert all(done.recalled and done.agreed for _, done in found)


def test_there_are_ten_jobs() -> None:
    assert len(JOBS) == 10
