"""A trace for Perfetto shows the time and process of each event."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import defaultdict
from typing import Any

from s3cache.insight import trace
from s3cache.records import Event
from tests.support.runs import BEGAN, HOSTILE, hostile, recalling, two_ranks

EVENTS = (
    Event("compile", BEGAN + 9.0, 5.0, "key"),
    Event("save", BEGAN + 9.5, 0.5, "key", 1000),
    Event("upload", BEGAN + 12.0, 2.0, "a", 1000),
    Event("upload", BEGAN + 13.0, 2.5, "b", 2000),
    Event("download", BEGAN + 14.0, 1.0, "c", ended="absent"),
)


def shown() -> list[dict[str, Any]]:
    first, second = two_ranks()
    text = trace([dataclasses.replace(first, events=EVENTS), second])
    found: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    return found


def test_names_and_times_come_from_the_records() -> None:
    names = {
        each["pid"]: each["args"]["name"] for each in shown() if each["name"] == "process_name"
    }
    assert names == {1: "/job/train.py (rank 0), s3cache", 2: "/job/train.py (rank 1), s3cache"}
    spans = {each["name"]: each for each in shown() if each["ph"] == "X"}
    hit = spans["hit: remote"]
    assert (hit["pid"], hit["dur"]) == (2, 400_000)  # microseconds
    assert abs(hit["ts"] - (BEGAN + 2.6) * 1e6) < 1
    assert hit["args"]["where"] == "train.py:3 in step"
    assert spans["compile"]["dur"] == 5_000_000
    assert spans["save"]["args"] == {"name": "key", "bytes": 1000}
    assert "download: absent" in spans


def test_overlapping_spans_are_in_separate_lanes() -> None:
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for each in shown():
        if each["ph"] == "X":
            lanes[each["pid"], each["tid"]].append((each["ts"], each["ts"] + each["dur"]))
    for spans in map(sorted, lanes.values()):
        assert all(end <= start + 1 for (_, end), (start, _) in itertools.pairwise(spans))
    assert len({each["tid"] for each in shown() if each["name"] == "upload"}) == 2
    named = {(each["pid"], each["tid"]) for each in shown() if each["name"] == "thread_name"}
    assert lanes.keys() <= named


def test_frames_are_in_a_separate_lane() -> None:
    found = json.loads(trace(recalling()))["traceEvents"]
    spans = {
        each["args"]["name"]: each for each in found if each["ph"] == "X" and each["dur"] > 1e5
    }
    assert spans["f0 x.py:0"]["name"] == "recall: recalled"
    assert spans["f3 x.py:3"]["name"] == "recall: refused: object"
    (lane,) = {each["tid"] for each in spans.values()}
    named = {each["tid"]: each["args"]["name"] for each in found if each["name"] == "thread_name"}
    assert named[lane] == "recall"
    assert "recall" not in json.dumps(shown())


def test_leads_and_waits_are_in_a_lane_with_the_names_of_ranks() -> None:
    """One rank compiles. The other waits for it, then to the bound for an unknown process."""
    first, second = two_ranks()
    leads = (Event("claim", BEGAN + 8.0, 3.0, "key"), *EVENTS)
    waits = (
        Event("wait", BEGAN + 8.0, 2.5, "key", ended="for 11@here"),
        Event("wait", BEGAN + 9.0, 0.5, "other", ended="too long for 7@there (rank 5, \x1b)"),
    )
    first = dataclasses.replace(first, pid=11, events=leads)
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


def test_hostile_text_stays_text() -> None:
    assert json.loads(trace(hostile()))["traceEvents"][0]["args"]["name"].count(HOSTILE) == 2
    assert json.loads(trace([]))["traceEvents"] == []
