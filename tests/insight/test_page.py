"""The page needs no other files, shows all lookups, and trusts no text of a record."""

from __future__ import annotations

import dataclasses
import html.parser
import re
from pathlib import Path

import pytest

from s3cache.insight import Explanation, page, sum_up
from s3cache.insight._report import EXPECTED
from s3cache.records import Event, Record, Run
from tests.support.runs import HOSTILE, fetched, hostile, recalling, two_ranks

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


def test_fetched_entries_that_were_not_looked_up_are_counted() -> None:
    totals = sum_up(fetched())
    assert (totals.unused, totals.unused_bytes) == (2, 2_000)
    assert "fetched, not used" in page(fetched())


def test_frames_are_counted_by_outcome() -> None:
    totals = sum_up(recalling())
    assert totals.features["recall"] == {"recalled": 2, "traced": 1, "refused: object": 1}
    assert totals.codes == ["object"]
    shown = Elements(page(recalling())).text
    assert "recall: 2 recalled, 1 traced, 1 refused: object." in shown
    assert "read on: s3cache explain object" in shown
    assert "rames" not in Elements(page(fetched())).text


# -- processes of a job


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
