"""A report on all processes of a job."""

from __future__ import annotations

from s3cache.insight import sum_up
from s3cache.records import Event, Run


def rank(number: int, *events: Event) -> Run:
    return Run(f"run-{number}", (), rank=str(number), pid=100 + number, events=events)


def test_a_report_shows_which_ranks_compiled_and_which_waited() -> None:
    runs = [
        rank(0, Event("claim", 1.0, 2.0, "key 1"), Event("claim", 2.0, 2.0, "key 2")),
        rank(
            1,
            Event("wait", 1.0, 2.0, "key 1", ended="for 100@here"),
            Event("wait", 2.0, 2.5, "key 2", ended="for 100@here"),
            Event("wait", 3.0, 0.25, "key 3", ended="too long for 7@\x1b[31melsewhere"),
            Event("claim", 4.0, 2.0, "key 3"),
        ),
        Run("another", (), pid=9, events=(Event("upload", 1.0, 1.0, "name"),)),
    ]
    first, second = sum_up(runs).shared
    assert first == "rank 0: compiled 2 graphs"
    assert second.startswith("rank 1: compiled 1 graph; waited for rank 0: 2 graphs, 4.5 s; ")
    assert "waited too long for 7@" in second
    assert second.endswith("elsewhere: 1 graph, 250 ms")
    assert "\x1b" not in second


def test_a_report_omits_processes_that_never_waited() -> None:
    assert sum_up([rank(0, Event("claim", 1.0, 2.0, "key"))]).shared == []
