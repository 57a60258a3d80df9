"""A page and a trace for Perfetto show all lookups, and trust no text of a record."""

from __future__ import annotations

import dataclasses
import html.parser
import itertools
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from s3cache.insight import Explanation, page, sum_up, trace
from s3cache.insight._report import EXPECTED
from s3cache.records import Event, Record, Run
from tests.support.runs import BEGAN, HOSTILE, fetched, hostile, recalling, two_ranks

# Elements without an end tag.
_VOID = {"meta", "br"}
_MAY_NAME = {"http-equiv", "content", "charset", "name", "lang", "class", "style", "title"}


class Elements(html.parser.HTMLParser):
    """The elements, attributes and text of a page; fails if the page is not well-formed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in _VOID and self.get_starttag_text()[-2:] != "/>":  # type: ignore[index]
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += f"{data}\n"


def test_an_fx_graph_that_misses_after_its_whole_graph_is_not_counted() -> None:
    """An FX graph that hits is counted, because it saves time."""
    run, _ = two_ranks()
    whole, *_ = run.records
    half = dataclasses.replace(whole, kind="fx", key="f" * 64, of_whole=True)
    hit = dataclasses.replace(half, outcome="hit", reason="local", saved_s=1.0)
    both = dataclasses.replace(run, records=(whole, half, hit))
    totals = sum_up([both])
    assert (totals.hits, totals.misses, totals.hit_rate) == (1, 1, 0.5)
    assert totals.outcomes == {("miss", "absent"): 1, ("hit", "local"): 1}
    assert totals.waited_s == pytest.approx(0.6)
    assert Elements(page([both])).names.count("tr") == 3
    alone = dataclasses.replace(half, of_whole=False)
    assert sum_up([dataclasses.replace(run, records=(alone,))]).misses == 1


def test_the_page_shows_all_parts_of_a_report() -> None:
    shown = Elements(page(two_ranks())).text
    for words in (
        *("/job/train.py", "2 processes", "50%", "1.4 min", "hit: remote", "miss: absent"),
        *("bypass: custom-operator", "FX graph", "rank 1"),
        "mine.op has no formula. train.py:7: op(x)",
        "had more lookups than are recorded",
        "read on: s3cache explain custom-operator",
    ):
        assert words in shown, words
    records = [r for run in two_ranks() for r in run.records if r.outcome == "miss"]
    explained = Elements(page(two_ranks(), [Explanation(r, f"{r.reason}!") for r in records])).text
    assert (explained.count("!"), explained.count("mine.op has no formula")) == (2, 1)


@pytest.mark.needs
def test_expected_reasons_are_those_of_the_documentation() -> None:
    reasons = Path(__file__).resolve().parents[2] / "docs" / "reasons.md"
    part = reasons.read_text(encoding="utf-8").partition("## Expected reasons\n")[2]
    assert {*re.findall(r"^### (\S+)$", part.partition("\n## ")[0], re.MULTILINE)} == EXPECTED
    hit = sum_up([Run("hit", (Record("aot", "hit", reason="local"),))])
    assert (hit.codes, "read on" in page([])) == ([], False)


def test_everything_from_records_is_escaped() -> None:
    text = page(hostile(), [Explanation(r, HOSTILE) for run in hostile() for r in run.records])
    shown = Elements(text)
    assert "script" not in shown.names
    assert HOSTILE.replace("\x1b", "\\x1b") in shown.text
    assert "\x1b" not in text
    for _, name, value in shown.attributes:
        assert HOSTILE not in value
        assert not name.startswith("on")
    assert json.loads(trace(hostile()))["traceEvents"][0]["args"]["name"].count(HOSTILE) == 2
    assert json.loads(trace([]))["traceEvents"] == []


def test_the_page_loads_no_other_resource() -> None:
    text = page(two_ranks())
    assert {name for _, name, _ in Elements(text).attributes} <= _MAY_NAME
    assert not re.search(r"url\(|@import|https?://|src=|href=", text)
    assert "default-src 'none'" in text


def test_the_page_shows_no_lookups_and_very_many_lookups() -> None:
    for runs in ([], [dataclasses.replace(run, records=()) for run in two_ranks()]):
        assert "Nothing was looked up" in Elements(page(runs)).text
    [run, _] = two_ranks()
    long = dataclasses.replace(run, records=run.records * 1_000)
    shown = Elements(page([long]))
    assert shown.names.count("tr") == 2_001
    assert "1,000 more lookups are not shown here" in shown.text
    assert sum_up([long]).misses == 2_000


@pytest.mark.needs("recall")
def test_frames_are_counted_by_outcome_and_have_a_separate_lane() -> None:
    totals = sum_up(recalling())
    assert totals.features["recall"] == {"recalled": 2, "traced": 1, "refused: object": 1}
    assert totals.codes == ["object"]
    text = Elements(page(recalling())).text
    assert "recall: 2 recalled, 1 traced, 1 refused: object." in text
    assert "read on: s3cache explain object" in text
    events = json.loads(trace(recalling()))["traceEvents"]
    spans = {it["args"]["name"]: it for it in events if it["ph"] == "X" and it["dur"] > 1e5}
    assert spans["f0 x.py:0"]["name"] == "recall: recalled"
    assert spans["f3 x.py:3"]["name"] == "recall: refused: object"
    (lane,) = {it["tid"] for it in spans.values()}
    named = {it["tid"]: it["args"]["name"] for it in events if it["name"] == "thread_name"}
    assert named[lane] == "recall"
    assert "recall" not in json.dumps(shown())
    assert "rames" not in Elements(page(fetched())).text


def test_fetched_entries_that_were_not_looked_up_are_counted() -> None:
    totals = sum_up(fetched())
    assert (totals.unused, totals.unused_bytes) == (2, 2_000)
    assert "fetched, not used" in page(fetched())


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
