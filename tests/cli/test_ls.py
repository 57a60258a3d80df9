"""``s3cache ls``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from s3cache import Cache, frame
from s3cache.records import Record
from tests.cli.commands import record

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.commands import Call
    from tests.support.shelves import Shelf


def test_each_entry_is_a_line(call: Call, shelf: Shelf) -> None:
    names = {shelf.add("aa" * 8, days=3), shelf.add("bb" * 8, variant="v2", first=False)}
    done = call("ls", "--url", shelf.url)
    assert done.code == 0
    assert len(done.out.splitlines()) == 2
    assert "3 d  " + "aa" * 8 + "  0" in done.out
    assert "bb" * 8 + "  v2" in done.out
    assert "2 entries" in done.err
    said = call("ls", "--url", shelf.url, "--json")
    assert {each["name"] for each in said.lines} == names
    assert said.err == ""


def test_filters_and_order(call: Call, shelf: Shelf) -> None:
    shelf.add("a1", size=10, days=9)
    shelf.add("a2", size=5000, torch="2.12.0")
    shelf.add("b1", size=900, kind="fx", days=1, tag="mine")

    def keys(*arguments: str) -> list[str]:
        done = call("ls", "--url", shelf.url, "--json", *arguments)
        assert done.code == 0, done.err
        return [each["key"] for each in done.lines]

    assert keys("--sort", "size") == ["a2", "b1", "a1"]
    assert keys("--sort", "size", "--reverse", "--limit", "2") == ["a1", "b1"]
    assert keys("--sort", "age") == ["a2", "b1", "a1"]
    assert keys("--sort", "torch") == ["a2", "a1", "b1"]
    assert keys("--sort", "key", "--key", "a") == ["a1", "a2"]
    assert keys("--older", "2d") == ["a1"]
    assert keys("--newer", "2d", "--sort", "key") == ["a2", "b1"]
    assert keys("--min-size", "4KB") == ["a2"]
    assert keys("--max-size", "800B") == ["a1"]
    assert keys("--kind", "fx") == keys("--tag", "mine") == ["b1"]
    assert keys("--torch", "2.12") == ["a2"]
    assert keys("--signer", "ci") == []
    assert len(keys("--limit", "1")) == 1


@pytest.mark.parametrize(
    ("option", "there"),
    [
        (("--kind", "nosuch"), "; entries have: aot, fx"),
        (("--torch", "2.1"), "; entries have: 2.12.0, 2.13.0+cpu"),
        (("--tag", "mime"), "; entries have: mine"),
        (("--device", "coda"), "; entries have: cpu, cuda"),
        (("--signer", "ci"), ""),
    ],
)
def test_a_filter_that_no_entry_meets_is_told_with_what_there_is(
    call: Call, shelf: Shelf, option: tuple[str, str], there: str
) -> None:
    """In each command, and with --json too: what is misspelt chooses nothing, silently."""
    shelf.add("a1", kind="aot", device="cuda cpu")
    shelf.add("b1", kind="fx", torch="2.12.0", tag="mine")
    warning = f"s3cache: warning: {' '.join(option)}: no entry has it{there}\n"
    for command in (
        ("ls", "--json"),
        ("du", "--json"),
        ("verify", "--json"),
        ("gc", "--json"),
        ("pull", "--json"),
        ("mirror", shelf.url, f"{shelf.url}/other?create=1", "--json"),
    ):
        url = () if command[0] == "mirror" else ("--url", shelf.url)
        done = call(*command, *url, *option)
        assert (done.code, done.err) == (0, warning), command
    assert "no entries" in call("ls", "--url", shelf.url, *option).err


def test_a_filter_that_one_entry_meets_is_told_of_none(call: Call, shelf: Shelf) -> None:
    """Nor is one of a place where nothing is, or where the others leave nothing."""
    arguments = ("ls", "--url", shelf.url, "--json", "--kind", "fx", "--torch", "2.12")
    shelf.root.mkdir(exist_ok=True)
    assert call(*arguments).err == ""
    shelf.add("b1", kind="fx", torch="2.12.0")
    shelf.add("b2", kind="aot", torch="2.13.0")
    assert call(*arguments).err == ""
    assert call(*arguments, "--key", "c", "--tag", "x").err == ""
    done = call(*arguments, "--kind", "fy", "--kind", "aot")
    assert "--kind fy: no entry has it" in done.err
    assert done.err.count("no entry") == 1


def test_that_only_the_first_thousand_are_sorted_is_said(call: Call, shelf: Shelf) -> None:
    for number in range(1001):
        shelf.put(f"v1/{number:03x}/k{number}.0", b"")
    arguments = ("ls", "--sort", "key", "--url", shelf.url)
    done = call(*arguments)
    assert len(done.out.splitlines()) == 1000
    assert "may be more" in done.err
    done = call(*arguments, "--limit", "1001")
    assert len(done.out.splitlines()) == 1001
    assert "may be more" not in done.err
    assert "may be more" not in call("ls", "--url", shelf.url).err


def test_who_only_looks_makes_no_directory(call: Call, shelf: Shelf, tmp_path: Path) -> None:
    """A misspelt URL is told as such, whatever it says of making one."""
    missing = tmp_path / "missing"
    for command in ("ls", "du", "stats", "verify", "pull"):
        for url in (f"file://{missing}", f"file://{missing}?create=true"):
            done = call(command, "--url", url)
            assert done.code == 3, command
            assert str(missing) in done.err
    assert call("mirror", f"file://{missing}", shelf.url).code == 3
    assert not missing.exists()
    shelf.add("a")
    assert call("mirror", shelf.url, f"file://{missing}").code == 0
    assert missing.exists()


def test_long_lines_say_what_headers_do_and_what_is_wrong(call: Call, shelf: Shelf) -> None:
    shelf.add("good", kind="fx", torch="2.12.1", tag="mine")
    shelf.damage(shelf.add("bad"), at=70)
    done = call("ls", "--url", shelf.url, "--long", "--sort", "key")
    bad, good = done.out.splitlines()
    assert "?" in bad
    assert "digest" in bad
    assert good.split()[4:] == ["0", "hits", "fx", "2.12.1", "-", "mine", "unsigned", "good", "0"]


def test_hits_are_those_that_this_machine_has_on_record(
    call: Call, shelf: Shelf, tmp_path: Path
) -> None:
    for key, device in {"a1": "cuda", "a2": "cpu", "a3": "cpu cuda"}.items():
        shelf.add(key, device=device)
    record(tmp_path / "local", *(Record("aot", "hit", key=key) for key in ("a2", "a3", "a3")))
    record(tmp_path / "local", Record("aot", "hit", key="a3"), Record("aot", "miss", key="a1"))
    found = call("ls", "--url", shelf.url, "--sort", "hits", "--json").lines
    assert [(each["key"], each["hits_here"]) for each in found] == [("a3", 3), ("a2", 1), ("a1", 0)]
    done = call("ls", "--url", shelf.url, "--long", "--device", "cuda", "--sort", "key")
    assert [line.split()[4:8] for line in done.out.splitlines()] == [
        ["0", "hits", "test", "2.13.0+cpu"],
        ["3", "hits", "test", "2.13.0+cpu"],
    ]
    assert "hits are those of this machine" in done.err
    never = call("ls", "--url", shelf.url, "--never-hit", "--json").lines
    assert [each["key"] for each in never] == ["a1"]


def test_the_local_tier_is_listed_whatever_remote_it_is_of(call: Call, shelf: Shelf) -> None:
    for url in (None, shelf.url):
        with Cache.open(url) as cache:
            cache.save("k", frame.encode(kind="test", key="k", sections={"s": b"abc"}))
    done = call("ls", "--local", "--json", "--long")
    assert [each["key"] for each in done.lines] == ["k", "k"]
    assert [each["problem"] for each in done.lines] == [None, None]
    assert len(call("ls", "--url", shelf.url, "--json").lines) == 1


def test_nothing_that_an_entry_says_reaches_the_terminal_as_a_command(
    call: Call, shelf: Shelf
) -> None:
    shelf.add("k", torch="2.13\x1b]0;owned\x07", tag="[red]\x1b[2J")
    for arguments in (["ls", "--long"], ["ls", "--long", "--json"], ["du", "--by", "tag"]):
        done = call(*arguments, "--url", shelf.url)
        assert done.code == 0
        assert "\x1b" not in done.out + done.err
        assert "[red]" in done.out or "ls" in arguments


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["ls"], 2, "has no URL; give --url, or set S3CACHE_URL"),
        (["ls", "--url", "file:///nowhere/at/all?create=false"], 3, "/nowhere/at/all"),
        (["ls", "--url", "ftp://x"], 2, "scheme 'ftp': is not known"),
        (["ls", "--url", "{url}", "--older", "soon"], 2, "'soon' is no time"),
        (["ls", "--url", "{url}", "--max-size", "big"], 2, "'big' is no size"),
        (["ls", "--url", "{url}", "--sort", "colour"], 2, "colour"),
        (["ls", "--url", "{url}", "--limit", "0"], 2, "--limit"),
        (["ls", "--url", "{url}", "--reverse"], 2, "nothing to reverse"),
        (["ls", "s3://AKIA:hunter2@bucket"], 2, "s3://…"),
        (["ls", "--url", "s3://AKIA:hunter2@bucket"], 2, "user name, a password"),
    ],
)
def test_what_cannot_be_used_is_one_clear_line(
    call: Call, shelf: Shelf, arguments: list[str], code: int, said: str
) -> None:
    done = call(*(each.format(url=shelf.url) for each in arguments))
    assert (done.code, done.out) == (code, "")
    assert len(done.err.splitlines()) == 1, done.err
    assert said in done.err
    assert "hunter2" not in done.err
