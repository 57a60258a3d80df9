"""``s3cache explain`` and ``report``: their output and their exit codes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from s3cache.records import Event, Record
from s3cache.settings import Settings
from s3cache.store import MemoryStore
from s3cache.util.text import sections
from tests.cli.commands import Call
from tests.support.caching import entry, open_engine
from tests.support.runs import recalling, record, two_ranks
from tests.support.waiting import eventually


def looked_up(key: str, time: float, version: str) -> Record:
    components = {"gm": ("g", "graph of 3 nodes"), "torch.version": (version, version)}
    return Record("aot", "miss", key=key, reason="absent", time=time, components=components)


def test_a_miss_is_explained_by_the_nearest_entry(call: Call, tmp_path: Path) -> None:
    record(tmp_path / "local", Record("aot", "hit", key="a", reason="local", time=1.0))
    assert call("explain").code == 0
    run = record(tmp_path / "local", looked_up("a", 1, "2.11.0"), looked_up("b", 2, "2.12.1"))
    for arguments in ((), (run,), ("b",)):
        done = call("explain", *arguments)
        assert done.code == 1
        assert "torch 2.11.0 → 2.12.1" in done.out
    found = call("explain", "--json").json
    assert found["run"] == run
    assert found["explanations"][1]["nearest"]["key"] == "a"
    (difference,) = found["explanations"][1]["differences"]
    text = {"component": "torch.version", "text": "torch 2.11.0 → 2.12.1"}
    assert difference == {**text, "old": "2.11.0", "new": "2.12.1"}


@pytest.mark.needs("ranks")
def test_ranks_of_a_job_are_explained_together(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A miss that several ranks share is reported once."""
    monkeypatch.setenv("S3CACHE_JOB", "nightly")
    for rank, other in ((1, "b"), (2, "c"), (0, "b")):
        monkeypatch.setenv("RANK", str(rank))
        run = record(
            tmp_path / "local",
            looked_up("a", 1, "2.12.1"),
            looked_up(other, 2, "2.12.1"),
            Record("aot", "hit", key="d", reason="local", time=3.0),
        )
    for arguments in ((), (run,)):
        done = call("explain", *arguments)
        assert ", ranks 0-2: 3 hit, 6 missed" in done.out
        misses = [line for line in done.out.splitlines() if line.startswith("miss: ")]
        ends = [line.rpartition(" (")[2] for line in misses]
        assert ends == ["ranks 0-2)", "ranks 0-1)", "rank 2)"]
    found = call("explain", "--json").json
    assert (found["processes"], found["hits"]) == ("ranks 0-2", 3)
    assert found["explanations"][1]["processes"] == "ranks 0-1"


def test_a_code_is_explained_even_if_a_file_has_its_name(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path / "local", looked_up("a", 1, "2.11.0"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "untrusted").write_text("")
    assert call("explain", "untrusted").out.startswith("untrusted: ")
    assert "word './untrusted': is not a code" in call("explain", "./untrusted").err


def test_the_last_line_names_the_codes_that_a_user_can_act_on(call: Call, tmp_path: Path) -> None:
    """Each code is named once, if it has a section; codes of other releases have none."""
    reason = {"code": "function", "message": "calls f"}
    record(
        tmp_path / "local",
        Record("aot", "miss", key="a", reason="untrusted", time=1.0),
        Record("aot", "miss", key="b", reason="untrusted", time=2.0),
        Record("aot", "bypass", reason="function kernel", time=3.0, reasons=(reason,)),
        Record("aot", "miss", key="c", reason="of another release", time=4.0),
    )
    last = call("explain").out.splitlines()[-1]
    assert last == "read on: s3cache explain untrusted function kernel"


def test_the_section_on_each_code_is_shown(call: Call) -> None:
    """As text, and with ``--json``."""
    codes = sorted({section.code for section in sections()})
    found = call("explain", "--json", *codes).lines
    assert {each["code"] for each in found} == {*codes}
    shown = call("explain", *codes).out
    assert "](" not in shown
    for each in found:
        assert set(each) == {"code", "kind", "title", "text", "page"}
        assert f"{each['code']}: {each['title']}\n\n" in shown
        # Links are replaced by their text.
        assert each["text"].partition("[")[0] in shown


def test_an_unknown_word_is_a_one_line_error(call: Call, tmp_path: Path) -> None:
    record(tmp_path / "local", looked_up("b", 1, "2.11.0"))
    for word, message in (
        ("custm-operator", "did you mean s3cache explain custom-operator"),
        ("custom_operator", "did you mean s3cache explain custom-operator"),
        ("confgerror", "did you mean s3cache explain ConfigError"),
        ("20261123-164506-9442-f443", "no such run"),
        ("a98f437a", "no such run, key or program is recorded"),
    ):
        done = call("explain", word)
        assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 1)
        assert message in done.err
        assert done.err.count("(s3cache explain") <= 1


@pytest.fixture
def runs() -> list[str]:
    """Return the names of two recorded runs, the earlier one first."""
    return [record(local(), *run.records) for run in two_ranks()]


def local() -> Path:
    return Path(Settings.load()[0].local_dir)


def test_several_runs_are_counted_together(call: Call, runs: list[str], tmp_path: Path) -> None:
    found = call("report", "--last", "2", "--json").json
    assert found["runs"] == runs
    assert call("report", "--run", runs[0][:-1], "--json").json["runs"] == runs[:1]
    assert (found["hits"], found["misses"], found["bypasses"]) == (2, 2, 1)
    assert (found["hit_rate"], found["spared_s"]) == (0.5, 87)
    assert {"outcome": "miss", "reason": "guard", "count": 1} in found["outcomes"]
    *_, last, more = call("report", "--last", "2").out.splitlines()
    assert last.startswith("50% of lookups hit; 87.0 s of compiling spared")
    assert more == "read on: s3cache explain custom-operator"  # the other misses are expected
    page = tmp_path / "report.html"
    call("report", "--last", "2", "--html", str(page))
    text = page.read_text(encoding="utf-8")
    assert "no entry has been saved" in text
    assert "mine.op has no formula" in text
    for wrong in (("--html", str(tmp_path / "nowhere" / "x.html")), ("--run", "x")):
        assert call("report", *wrong).code == 2


@pytest.mark.needs("job_profile")
def test_unused_entries_that_a_job_profile_fetched_are_reported(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine looks up one of three graphs that an earlier one saved."""
    monkeypatch.setattr(sys, "argv", [__file__])  # a pytest worker runs no file
    remote, keys = MemoryStore(), [name * 32 for name in ("ab", "cd", "ef")]
    with open_engine(tmp_path / "other", remote, job_profiles=True) as first:
        for key in keys:
            first.save(key, entry(key))
        eventually(lambda: first.parts["job_profile"].is_known)
    with open_engine(local(), remote, job_profiles=True) as second:
        second.start()
        eventually(lambda: second.stats().downloaded == len(keys))
        found = second.lookup(keys[0])
        second.record(Record("aot", "hit", key=keys[0], time=1.0, elapsed_s=found.elapsed_s))
    report = call("report", "--json").json
    assert (report["unused"], report["unused_bytes"]) == (2, 2 * entry(keys[0]).size)
    assert "fetched and not used: 2 entries of" in call("report").out


def test_used_keys_are_written_to_the_manifest(call: Call, tmp_path: Path) -> None:
    """A key was used if it hit or was saved; a miss without a save does not count."""
    outcomes = (("hit", "a1"), ("miss", "a2"), ("miss", "a3"), ("bypass", ""))
    lookups = [Record("aot", outcome, key=key, time=1.0) for outcome, key in outcomes]
    run = record(local(), *lookups, Event("save", 2.0, 0.1, "a2", 10))
    path = tmp_path / "keys"
    call("report", "--manifest", str(path))
    comment, *keys = path.read_text(encoding="utf-8").splitlines()
    assert comment == f"# 2 keys that {run} used"
    assert keys == ["a1", "a2"]


@pytest.mark.needs("recall")
def test_frames_are_reported_if_there_are_any(call: Call, runs: list[str]) -> None:
    assert "frames" not in call("report").out
    (run,) = recalling()
    record(local(), *run.records, *run.events)
    assert "recall: 2 recalled, 1 traced, 1 refused: object" in call("report").out.splitlines()
    assert call("report", "--json").json["features"]["recall"]["recalled"] == 2
