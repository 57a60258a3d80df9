"""``s3cache explain``: its output and its exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from s3cache.records import Record
from s3cache.util.text import sections
from tests.cli.commands import Call
from tests.support.runs import record


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
        assert [line.rpartition(" (")[2] for line in misses] == [
            "ranks 0-2)",
            "ranks 0-1)",
            "rank 2)",
        ]
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
    assert "word './untrusted': is not code" in call("explain", "./untrusted").err


# -- the last line: what to read next


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


# -- the meaning of a code


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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["custm-operator"], "did you mean s3cache explain custom-operator"),
        (["custom_operator"], "did you mean s3cache explain custom-operator"),
        (["confgerror"], "did you mean s3cache explain ConfigError"),
        (["20261123-164506-9442-f443"], "no such run"),
        (["a98f437a"], "no such run, key or program is recorded"),
    ],
)
def test_an_unknown_word_is_a_one_line_error(
    call: Call, tmp_path: Path, words: list[str], message: str
) -> None:
    record(tmp_path / "local", looked_up("b", 1, "2.11.0"))
    done = call("explain", *words)
    assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 1)
    assert message in done.err
    assert done.err.count("(s3cache explain") <= 1
