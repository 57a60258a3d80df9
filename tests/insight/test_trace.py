"""A trace that Perfetto reads: what happened when, in which process, and what at once."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

from s3cache.insight import trace
from s3cache.records import Event
from tests.support.runs import BEGAN, HOSTILE, hostile, two_ranks

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


def test_each_process_is_named_by_its_rank() -> None:
    names = {
        each["pid"]: each["args"]["name"] for each in shown() if each["name"] == "process_name"
    }
    assert names == {1: "/job/train.py (rank 0), s3cache", 2: "/job/train.py (rank 1), s3cache"}


def test_times_are_those_of_the_records_in_microseconds() -> None:
    spans = {each["name"]: each for each in shown() if each["ph"] == "X"}
    hit = spans["hit: remote"]
    assert (hit["pid"], hit["dur"]) == (2, 400_000)
    assert abs(hit["ts"] - (BEGAN + 2.6) * 1e6) < 1
    assert hit["args"]["where"] == "train.py:3 in step"
    assert spans["compile"]["dur"] == 5_000_000
    assert spans["save"]["args"] == {"name": "key", "bytes": 1000}
    assert "download: absent" in spans


def test_spans_at_once_are_in_lanes_of_their_own() -> None:
    spans = [each for each in shown() if each["ph"] == "X"]
    for lane in {(each["pid"], each["tid"]) for each in spans}:
        inside = sorted(
            (each["ts"], each["ts"] + each["dur"])
            for each in spans
            if (each["pid"], each["tid"]) == lane
        )
        assert all(end <= start + 1 for (_, end), (start, _) in itertools.pairwise(inside))
    uploads = [each["tid"] for each in spans if each["name"] == "upload"]
    assert len(set(uploads)) == 2
    named = {(each["pid"], each["tid"]) for each in shown() if each["name"] == "thread_name"}
    assert {(each["pid"], each["tid"]) for each in spans} <= named


def test_hostile_text_stays_text() -> None:
    assert json.loads(trace(hostile()))["traceEvents"][0]["args"]["name"].count(HOSTILE) == 2
    assert json.loads(trace([]))["traceEvents"] == []
