"""A miss is compared with the nearest entry, and a run is explained."""

from __future__ import annotations

import asyncio
import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from s3cache import Cache, explain, frame
from s3cache.entries import NAMES, first_name
from s3cache.errors import ConfigError
from s3cache.insight import Explanation
from s3cache.insight._explain import StoredEntries
from s3cache.manage import EntryLocation
from s3cache.records import Record
from s3cache.store import MemoryStore
from s3cache.trust import generate, policy_of
from tests.support.runs import record
from tests.support.shelves import Shelf
from tests.support.stores import CountingStore


def lookup(key: str, time: float, outcome: str = "miss", **changes: Any) -> Record:
    values = {"gm": "g", "torch.version": "2.12.1", "grad_enabled": "True", **changes.pop("of", {})}
    components = {
        name: (hashlib.sha256(value.encode()).hexdigest()[:32], value)
        for name, value in values.items()
    }
    given = {"reason": "absent", "components": components, "kind": "aot", **changes}
    return Record(outcome=outcome, key=key, time=time, **given)


def last(root: Path, **options: Any) -> Explanation:
    return explain(local_dir=str(root), **options).explanations[-1]


def code(text: str) -> dict[str, Any]:
    return {"of": {"gm": text}, "parts": {"gm": {"code": text}}}


def options(**changed: str) -> dict[str, Any]:
    return {"of": {"inductor_config": str(changed)}, "parts": {"inductor_config": changed}}


OLD, OLDER = {"torch.version": "2.11.0"}, {"torch.version": "2.10.0"}
NO_GRAD = {"grad_enabled": "False"}


@pytest.mark.parametrize(
    ("expected", "records"),
    [
        # The same graph comes first,
        ("a", [lookup("a", 1, of={**OLD, **NO_GRAD}), lookup("b", 2, of={"gm": "another"}),
               lookup("c", 3)]),
        # then the most components in common,
        ("b", [lookup("a", 1, of={**OLD, **NO_GRAD}), lookup("b", 2, of=OLD),
               lookup("c", 3, of={**OLDER, **NO_GRAD}), lookup("d", 4)]),
        # then, among other graphs, the one with the most similar code,
        ("a", [lookup("a", 1, **code("a = x\nb = y\nc = z")),
               lookup("b", 2, **code("k = l\nm = n")),
               lookup("c", 3, **code("a = x\nb = y\nc = z + 1"))]),
        # then the one with the fewest different details, and at last the latest.
        ("c", [lookup("a", 1, **options(x="1 → 2", y="1 → 2", z="1 → 2")),
               lookup("b", 2, **options(x="1 → 2", y="1 → 2")),
               lookup("c", 3, **options(x="1 → 2", z="1 → 2")),
               lookup("d", 4, **options(x="1 → 3", y="1 → 3", z="1 → 3")),
               lookup("e", 5, of={"inductor_config": "of another release"}),
               lookup("f", 6, **options(x="1 → 2"))]),
        # Later lookups and lookups of the other level are not compared.
        ("", [lookup("a", 5, kind="fx"), lookup("b", 4), lookup("c", 9, "hit")]),
    ],
    ids=["graph", "components", "code", "details", "none"],
)  # fmt: skip
def test_a_miss_is_compared_with_the_nearest_entry(
    tmp_path: Path, expected: str, records: list[Record]
) -> None:
    record(tmp_path, *records)
    assert last(tmp_path).entry == expected


# -- entries of the remote


def entry(like: Record, *, parts: Mapping[str, Mapping[str, str]] | None = None) -> bytes:
    """Return an entry under the key of a lookup."""
    return frame.encode(
        kind=like.kind,
        key=like.key,
        schema=2,
        sections={"entry": b"x", "parts": json.dumps(parts or {}).encode()},
        meta={"components": {name: list(pair) for name, pair in like.components.items()}},
        created_ns=int(like.time * 1e9),
    )


PARTS = {"inductor_config": {"max_autotune": "False → True"}}
TUNED = lookup("ab", 1, "hit", reason="local", of={"inductor_config": "tuned"})
MISSED = lookup("c", 2, of={"inductor_config": "as ever"})


@pytest.mark.parametrize("known", ["run", "the local tier", "the remote"])
def test_an_entry_is_compared_by_its_details(tmp_path: Path, known: str) -> None:
    """Records of hits have no details; an entry is compared even if its lookup was not recorded."""
    remote, local = Shelf(tmp_path / "remote"), tmp_path / "local"
    recorded, tuned = known == "run", entry(TUNED, parts=PARTS)
    url = None if known == "the local tier" else remote.url
    if url is None:
        with Cache.open(local_dir=str(local)) as cache:
            cache.save(TUNED.key, tuned)
    else:
        remote.put(first_name(TUNED.key), tuned)
    other = lookup("b", 1, of={"inductor_config": "x", "grad_enabled": "False"})
    record(local, TUNED if recorded else other, MISSED)
    found = explain(url=url, local_dir=str(local))
    one = found.explanations[-1]
    assert (one.entry, found.unasked) == ("ab", "")
    assert one.known_from.startswith(known)
    assert [each.text for each in one.differences] == ["inductor.max_autotune True → False"]
    if known == "the remote":  # a caller can exclude the remote
        assert last(local, url=remote.url, remote=False).entry == "b"


def test_an_entry_that_is_damaged_newer_or_not_trusted_is_skipped(tmp_path: Path) -> None:
    remote, local = Shelf(tmp_path / "remote"), tmp_path / "local"
    keys = {"trust": "require", "trusted_keys": f"team={generate('mine').public_text()}"}
    name = remote.put(first_name(TUNED.key), entry(TUNED))
    record(local, MISSED)
    assert last(local, url=remote.url).entry == "ab"
    assert last(local, url=remote.url, **keys).entry == ""
    remote.damage(name, at=70)
    assert last(local, url=remote.url).entry == ""
    remote.put(name, entry(replace(TUNED, time=3.0)))
    assert last(local, url=remote.url).entry == ""


async def test_a_large_remote_takes_few_requests() -> None:
    """As the documentation says: a listing of 8,000 names, and 256 headers."""
    store = CountingStore(MemoryStore())
    for number in range(9_000):
        if number == 7_999:
            await store.inner.put(first_name(TUNED.key), entry(TUNED))
        await store.inner.put(f"{NAMES}fff/a{number:064x}.0", b"")
    place = EntryLocation(store, False, policy_of(None, "", "", audience="main"))
    source = StoredEntries("the remote", lambda: place)
    neighbors = await asyncio.to_thread(lambda: source.neighbors)
    assert [each.record.key for each in neighbors] == [TUNED.key]
    assert (source.problem, store.listed, store.heads) == ("", 8_000, 256)


def test_a_remote_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    record(tmp_path / "local", lookup("c", 2))
    found = explain(url=f"file://{tmp_path}/absent", local_dir=str(tmp_path / "local"))
    assert found.explanations[0].entry == ""
    assert found.unasked
    assert f"the remote could not be read: {found.unasked}" in str(found)


# -- a run


def test_hits_are_counted_and_misses_are_explained(tmp_path: Path) -> None:
    """The miss of a whole graph explains those of its FX graphs, but not a wait that failed."""
    of_whole: dict[str, Any] = {"kind": "fx", "of_whole": True}
    record(
        tmp_path,
        lookup("a", 1, "hit", reason="local"),
        lookup("b", 2),
        lookup("c", 3, **of_whole),
        lookup("d", 4, reason="waited", **of_whole),
    )
    found = explain(local_dir=str(tmp_path))
    assert [each.record.key for each in found.explanations] == ["b", "d"]
    assert found.hits == 1
    assert str(found).splitlines()[0].endswith(": 1 hit, 2 missed, 0 bypassed")
    assert "within wait_s" in found.explanations[1].why
    assert str(found).endswith("waited")


def test_only_absent_entries_are_compared(tmp_path: Path) -> None:
    reasons = ("guard", "timeout", "untrusted")
    misses = (lookup(reason, at, reason=reason) for at, reason in enumerate(reasons, 2))
    record(tmp_path, lookup("a", 1, of={"gm": "h"}), *misses)
    _, *others = explain(local_dir=str(tmp_path)).explanations
    assert all(each.why and not each.differences for each in others)


def test_a_bypass_is_shown_with_its_reasons_lines_and_fixes(tmp_path: Path) -> None:
    details = {"message": "calls mine", "fix": "vouch", "node": "mine", "line": "m.py:3"}
    where = ("t.py", 7, "main")
    reasons = ({"code": "function", **details},)
    record(tmp_path, lookup("", 1, "bypass", reason="function", where=where, reasons=reasons))
    text = str(explain(local_dir=str(tmp_path)))
    for words in ("t.py:7 in main", "mine: calls mine (function)", "m.py:3", "fix: vouch"):
        assert words in text


def test_foreign_text_is_shown_as_printable_text(tmp_path: Path) -> None:
    """This is also true for ``repr``, which IPython shows."""
    hostile = "\x1b[31m"
    record(
        tmp_path,
        lookup("a", 1, of={"gm": hostile}),
        lookup("b", 2, where=(hostile, 3, "step"), rejected=(hostile,)),
        lookup("c", 3, "bypass", reasons=({"message": hostile, "code": "x", "fix": hostile},)),
    )
    found = explain(local_dir=str(tmp_path))
    for each in (found, *found.explanations):
        assert repr(each) == str(each)
        assert hostile not in str(each)
    assert str(found).count("\\x1b[31m") >= 5


def test_the_error_without_a_record_names_the_fix(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="s3cache run PROGRAM makes a record"):
        explain(local_dir=str(tmp_path))
    record(tmp_path, lookup("a", 1))
    for what in ("19990101", "b", "train.py"):
        with pytest.raises(ConfigError, match=f"explain {what}: no such run, key or program"):
            explain(what, local_dir=str(tmp_path))


# -- the last run of a program

RECORDS = """
import os, sys
from s3cache.records import Record, Recorder
recorder = Recorder(os.environ["S3CACHE_LOCAL_DIR"])
os.chdir("/")  # a program may change its directory
recorder.add(Record("aot", "miss", key="k" + sys.argv[1], reason="absent", time=1.0))
recorder.close(60)
"""


def test_the_last_run_of_a_script_or_module_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path or its end finds the program, with any command and any later working directory."""
    local = tmp_path / "local"
    monkeypatch.setenv("S3CACHE_LOCAL_DIR", str(local))
    monkeypatch.chdir(tmp_path)
    local.mkdir(mode=0o700)
    for name in ("train.py", "other/train.py", "package/job.py", "package/__main__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(RECORDS)
    programs = (["train.py"], ["other/train.py"], ["-m", "package.job"], ["package"])
    for number, program in enumerate(programs, 1):
        subprocess.run([sys.executable, *program, str(number)], cwd=tmp_path, check=True)
        # Names of runs have a resolution of seconds, and the latest run comes first. So each run
        # gets a different day.
        (new,) = (each for each in (local / "records").iterdir() if each.name[:4] != "1999")
        new.rename(new.with_name(f"1999010{number}-{new.name}"))

    def key(program: str) -> str:
        return explain(program).explanations[0].record.key

    assert key(str(tmp_path / "train.py")) == key("./train.py") == "k1"
    assert key("other/train.py") == "k2"
    assert key("package.job") == key("package/job.py") == key("job.py") == "k3"
    assert key("package") == key("") == "k4"
    with pytest.raises(ConfigError):  # not a complete name at the end of the path
        explain("rain.py")
