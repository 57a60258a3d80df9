"""``s3cache explain``: what it prints, and how it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from s3cache.records import Record
from tests.cli.commands import record

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.commands import Call


def looked_up(key: str, time: float, version: str) -> Record:
    of = {"gm": ("g", "graph of 3 nodes"), "torch.version": (version, version)}
    return Record("aot", "miss", key=key, reason="absent", time=time, components=of)


def test_a_miss_is_told_with_the_nearest_entry(call: Call, tmp_path: Path) -> None:
    run = record(tmp_path / "local", looked_up("a", 1, "2.11.0"), looked_up("b", 2, "2.12.1"))
    for arguments in ((), ("--run", run), ("b",)):
        done = call("explain", *arguments)
        assert done.code == 1
        assert "torch 2.11.0 → 2.12.1" in done.out
    found = call("explain", "--json").json
    assert found["run"] == run
    assert found["explanations"][1]["nearest"]["key"] == "a"
    assert found["explanations"][1]["differences"] == [
        {
            "component": "torch.version",
            "text": "torch 2.11.0 → 2.12.1",
            "old": "2.11.0",
            "new": "2.12.1",
        }
    ]


def test_ranks_of_a_job_are_explained_together(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is equal in all of them is told once."""
    monkeypatch.setenv("S3CACHE_JOB", "nightly")
    for rank, other in ((1, "b"), (2, "c"), (0, "b")):
        monkeypatch.setenv("RANK", str(rank))
        run = record(
            tmp_path / "local",
            looked_up("a", 1, "2.12.1"),
            looked_up(other, 2, "2.12.1"),
            Record("aot", "hit", key="d", reason="local", time=3.0),
        )
    for arguments in ((), ("--run", run)):
        done = call("explain", *arguments)
        assert ", ranks 0-2: 3 hit, 6 missed" in done.out
        told = [line for line in done.out.splitlines() if line.startswith("miss: ")]
        assert [line.rpartition(" (")[2] for line in told] == [
            "ranks 0-2)",
            "ranks 0-1)",
            "rank 2)",
        ]
    found = call("explain", "--json").json
    assert (found["processes"], found["hits"]) == ("ranks 0-2", 3)
    assert found["explanations"][1]["processes"] == "ranks 0-1"


def test_where_all_was_a_hit_it_ends_with_0(call: Call, tmp_path: Path) -> None:
    record(tmp_path / "local", Record("aot", "hit", key="a", reason="local", time=1.0))
    done = call("explain")
    assert (done.code, done.err) == (0, "")
    assert "1 hit" in done.out


def test_without_records_it_says_so(call: Call) -> None:
    done = call("explain")
    assert done.code == 2
    assert "run a program" in done.err


def test_what_a_terminal_would_obey_is_shown_as_text(call: Call, tmp_path: Path) -> None:
    record(
        tmp_path / "local",
        Record("aot", "miss", key="a", reason="\x1b[2J", where=("\x1b]0;x", 1, "f")),
    )
    assert "\x1b" not in call("explain").out
