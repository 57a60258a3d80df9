"""Reports and traces show which ranks compiled, and which waited for them."""

from __future__ import annotations

import dataclasses
import json

from s3cache.insight import sum_up, trace
from s3cache.records import Event, Run
from tests.support.runs import BEGAN, two_ranks


def rank(number: int, *events: Event) -> Run:
    return Run(f"run-{number}", (), process=f"rank {number}", pid=100 + number, events=events)


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
    totals = sum_up(runs)
    first, second = totals.lines
    assert totals.more["shared"] == totals.as_dict()["shared"] == [first, second]
    assert first == "rank 0: compiled 2 graphs"
    assert second.startswith("rank 1: compiled 1 graph; waited for rank 0: 2 graphs, 4.5 s; ")
    assert "waited too long for 7@" in second
    assert second.endswith("elsewhere: 1 graph, 250 ms")
    assert "\x1b" not in second


def test_a_report_omits_processes_that_never_waited() -> None:
    assert sum_up([rank(0, Event("claim", 1.0, 2.0, "key"))]).more["shared"] == []


def test_claims_and_waits_are_in_a_lane_with_the_names_of_ranks() -> None:
    """One rank compiles. The other waits for it, then to the bound for an unknown process."""
    first, second = two_ranks()
    claims = (Event("claim", BEGAN + 8.0, 3.0, "key"),)
    waits = (
        Event("wait", BEGAN + 8.0, 2.5, "key", ended="for 11@here"),
        Event("wait", BEGAN + 9.0, 0.5, "other", ended="too long for 7@there (rank 5, \x1b)"),
    )
    first = dataclasses.replace(first, pid=11, events=claims)
    second = dataclasses.replace(second, pid=12, events=waits)
    found = json.loads(trace([first, second]))["traceEvents"]
    lanes = {each["tid"]: each["args"]["name"] for each in found if each["name"] == "thread_name"}
    (lane,) = (lane for lane, name in lanes.items() if name.endswith("waits"))
    spans = [each for each in found if each["ph"] == "X" and each["tid"] == lane]
    shown = [(each["pid"], each["name"], each["dur"]) for each in spans]
    assert (1, "claim", 3_000_000) in shown
    assert (2, "wait: for rank 0", 2_500_000) in shown
    (name,) = {name for _, name, _ in shown if "too long" in name}
    assert name.startswith("wait: too long for 7@there (rank 5, ")
    assert "\x1b" not in name
