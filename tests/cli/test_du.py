"""``s3cache du``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from s3cache.records import Record
from tests.cli.commands import record

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.commands import Call
    from tests.support.shelves import Shelf


@pytest.mark.parametrize(
    ("by", "groups"),
    [
        ("age", {"below 1 hour": 1, "below 7 days": 1, "30 days or more": 2}),
        ("size", {"below 64 KiB": 3, "below 1 MiB": 1}),
        ("kind", {"test": 2, "fx": 1, "(not readable)": 1}),
        ("torch", {"2.13.0+cpu": 2, "2.12.0": 1, "(not readable)": 1}),
        ("tag", {"mine": 1, "(none)": 2, "(not readable)": 1}),
        ("signer", {"(nobody)": 3, "(not readable)": 1}),
        ("device", {"cuda": 1, "(does not say)": 2, "(not readable)": 1}),
        ("hits", {"1": 1, "none here": 3}),
    ],
)
def test_entries_and_sizes_are_summed_up(
    call: Call, shelf: Shelf, tmp_path: Path, by: str, groups: dict[str, int]
) -> None:
    record(tmp_path / "local", Record("aot", "hit", key="b"))
    shelf.add("a", device="cuda")
    shelf.add("b", days=5, kind="fx", tag="mine")
    shelf.add("c", days=50, torch="2.12.0", size=70 << 10)
    name = shelf.add("d")
    shelf.damage(name, at=70)
    shelf.put(name, shelf.files.read(name) or b"", days=60)
    found = call("du", "--by", by, "--url", shelf.url, "--json").json
    assert {each[by]: each["entries"] for each in found["groups"]} == groups
    assert found["entries"] == 4
    sizes = [each["bytes"] for each in found["groups"]]
    assert sum(sizes) == found["bytes"] == sum(info.size for info in shelf.files.walk())
    assert sizes == sorted(sizes, reverse=True)


def test_what_is_named_and_not_there_is_said(call: Call, shelf: Shelf, tmp_path: Path) -> None:
    for key in ("a", "b"):
        shelf.add(key)
    manifest = tmp_path / "keys"
    manifest.write_text("a\ngone\n")
    done = call("du", "--manifest", manifest, "--url", shelf.url)
    assert (done.code, done.err) == (1, "gone: nothing is there\n")
    done = call("du", "--manifest", manifest, "--url", shelf.url, "--json")
    assert (done.code, done.err) == (1, "")
    assert (done.json["entries"], done.json["absent"]) == (1, ["gone"])
    manifest.write_text("a\n")
    assert call("du", "--manifest", manifest, "--url", shelf.url).code == 0


def test_people_get_a_table_with_a_sum(call: Call, shelf: Shelf) -> None:
    shelf.add("a", size=2000)
    done = call("du", "--by", "kind", "--url", shelf.url)
    assert done.code == 0
    lines = [line.split() for line in done.out.splitlines() if line.strip()]
    assert lines[0] == ["kind", "entries", "size"]
    assert [line[:2] for line in lines if line[0] in ("test", "all")] == [
        ["test", "1"],
        ["all", "1"],
    ]
    assert call("du", "--url", shelf.url, "--kind", "fx", "--json").json["entries"] == 0
