"""With ``recall="auto"``, a frame is recalled once two processes of a program traced it alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.machines import Machine, remote_url
from tests.support.marks import slow

pytestmark = [slow, pytest.mark.timeout(900)]

FACTOR = 2.0


def start(url: str, setup: str, options: dict[str, Any], times: int) -> dict[str, Any]:
    """Start the job once; return the counts of recall, the result, and how a miss is explained."""
    import torch

    import s3cache

    exec(setup, globals())

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * FACTOR

    # A directory of the test decides otherwise whether the job is a canary.
    given = {"recall": "auto", "recall_canary": 10**9, "job_profiles": False, **options}
    for _ in range(times):
        torch.compiler.reset()
        with s3cache.enabled(url, **given) as cache:
            result = torch.compile(scaled)(torch.ones(4))
            cache.flush(60)
            counts = dict(cache.stats().features["recall"])
            explained = s3cache.explain().explanations
    lines = [each.line for each in explained if each.record.kind == "recall"]
    return {**counts, "value": float(result[0]), "why": " ".join(lines)}


class Job:
    """A job that starts again and again, each time on an empty machine with the same store."""

    def __init__(self, root: Path) -> None:
        self._root, self._starts = root, 0

    def start(self, setup: str = "", times: int = 1, **options: Any) -> dict[str, Any]:
        self._starts += 1
        machine = Machine(self._root / f"machine-{self._starts}")
        job = f"{__name__}:start"
        result: dict[str, Any] = machine.run(
            job, remote_url(self._root), setup, options, times, server=self._starts % 2
        ).result
        return result


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_the_third_start_recalls_unless_it_is_a_canary_or_another_program(job: Job) -> None:
    first, second, third = job.start(), job.start(), job.start()
    assert (first["saved"], first["agreed"]) == (1, 0)
    assert (second["recalled"], second["agreed"], second["held_back:unconfirmed"]) == (0, 1, 1)
    assert "no other process has traced it yet" in second["why"]
    assert (third["recalled"], third["traced"]) == (1, 0)
    assert first["value"] == second["value"] == third["value"]
    canary = job.start(recall_canary=1)
    assert (canary["recalled"], canary["agreed"], canary["held_back:canary"]) == (0, 1, 1)
    changed = job.start("import builtins; builtins.flash = 1")
    assert (changed["recalled"], changed["held_back:program"]) == (0, 1)
    assert "builtins has changed" in changed["why"]
    device = job.start(
        "from s3cache.features.recall import dynamo; dynamo.uses_accelerator = lambda: True"
    )
    assert (device["recalled"], device["agreed"], device["held_back:device"]) == (0, 1, 1), device
    assert job.start()["recalled"] == 1


def test_a_process_that_traces_again_confirms_nothing(job: Job) -> None:
    again = job.start(times=3)
    assert (again["recalled"], again["agreed"]) == (0, 1)
    assert [job.start()["recalled"] for _ in range(2)] == [0, 1]


def test_values_in_which_restarts_differ_do_not_prevent_recall(job: Job) -> None:
    run = "import time; STARTED = time.time(); RUN = str(STARTED)"
    assert [job.start(run)["recalled"] for _ in range(4)] == [0, 0, 1, 1]


def test_readers_use_what_was_agreed_and_add_nothing(job: Job) -> None:
    read_only: dict[str, Any] = {"mode": "read-only"}
    job.start()
    assert [job.start(**read_only)["recalled"] for _ in range(2)] == [0, 0]
    job.start()
    last = job.start(**read_only)
    assert last["recalled"] == 1, last


#: What both rules would have to miss, for a canary to find it.
BLIND = """
from s3cache.features.recall import agreement, comparison
compare = comparison.FrameComparison._difference
comparison.FrameComparison._difference = lambda self: "" if compare(self) else ""
agreement.difference = lambda *facts: ""
FACTOR = 3.0
"""


def test_a_canary_that_disagrees_buries_the_candidate(job: Job, tmp_path: Path) -> None:
    """It writes a report without values."""
    for _ in range(2):
        job.start()
    assert job.start(BLIND)["value"] == pytest.approx(2 * 0.84147, rel=1e-4)  # a wrong recall
    canary = job.start(BLIND, recall_canary=1)
    assert (canary["disagreed"], canary["value"]) == (1, pytest.approx(3 * 0.84147, rel=1e-4))
    assert [job.start(setup)["recalled"] for setup in (BLIND, "")] == [0, 0]
    (report,) = (tmp_path / "machine-4").rglob("recall-*.json")
    content = json.loads(report.read_text())
    assert content["why"] == "tracing gives another result"
    assert {*content["recorded"]} == {*content["traced"]}
    assert "outcome" in content["recorded"]
