"""Which entry a miss is compared with, and what is said of a run."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections import Counter
from dataclasses import replace
from operator import methodcaller
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from s3cache import Cache, Graph, GraphBreak, Report, Saved, explain, frame
from s3cache.entries import NAMES, first_name
from s3cache.errors import ConfigError
from s3cache.graph import BypassReason
from s3cache.insight._sources import EntrySource
from s3cache.manage import Place
from s3cache.records import Record, Recorder
from s3cache.store import MemoryStore, WrapperStore
from s3cache.trust import generate, policy_of
from tests.support.shelves import Shelf
from tests.support.waiting import LONG_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

    from s3cache.store import ObjectInfo


def lookup(key: str, time: float, outcome: str = "miss", **changes: Any) -> Record:
    values = {"gm": "g", "torch.version": "2.12.1", "grad_enabled": "True", **changes.pop("of", {})}
    components = {
        name: (hashlib.sha256(value.encode()).hexdigest()[:32], value)
        for name, value in values.items()
    }
    given = {"reason": "absent", "components": components, "level": "aot", **changes}
    return Record(outcome=outcome, key=key, time=time, **given)


def write(root: Path, *records: Record) -> str:
    root.mkdir(exist_ok=True)
    recorder = Recorder(str(root))
    for record in records:
        recorder.add(record)
    recorder.close(LONG_S)
    return recorder.run


def nearest(root: Path) -> str:
    (last,) = explain(local_dir=str(root)).explanations[-1:]
    return last.entry


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
        # of other graphs the one with the code most like it,
        ("a", [lookup("a", 1, **code("a = x\nb = y\nc = z")),
               lookup("b", 2, **code("k = l\nm = n")),
               lookup("c", 3, **code("a = x\nb = y\nc = z + 1"))]),
        # of equals the one in which the fewest details differ, and of those the latest.
        ("c", [lookup("a", 1, **options(x="1 → 2", y="1 → 2", z="1 → 2")),
               lookup("b", 2, **options(x="1 → 2", y="1 → 2")),
               lookup("c", 3, **options(x="1 → 2", z="1 → 2")),
               lookup("d", 4, **options(x="1 → 3", y="1 → 3", z="1 → 3")),
               lookup("e", 5, of={"inductor_config": "of another release"}),
               lookup("f", 6, **options(x="1 → 2"))]),
        # A later lookup, or one of the other level, is no entry to compare with.
        ("", [lookup("a", 5, level="fx"), lookup("b", 4), lookup("c", 9, "hit")]),
    ],
    ids=["graph", "components", "code", "details", "none"],
)  # fmt: skip
def test_the_nearest_entry(tmp_path: Path, expected: str, records: list[Record]) -> None:
    write(tmp_path, *records)
    assert nearest(tmp_path) == expected


# -- entries of the local tier


def entry(like: Record, *, parts: Mapping[str, Mapping[str, str]] | None = None) -> bytes:
    """Return an entry under the key that was looked up."""
    return frame.encode(
        kind=like.level,
        key=like.key,
        schema=2,
        sections={"entry": b"x", "parts": json.dumps(parts or {}).encode()},
        meta={"components": {name: list(pair) for name, pair in like.components.items()}},
        created_ns=int(like.time * 1e9),
    )


def keep(root: Path, like: Record, *, parts: Mapping[str, Mapping[str, str]]) -> None:
    """Put an entry into the local tier, under the key that was looked up."""
    with Cache.open(local_dir=str(root)) as cache:
        assert isinstance(cache.save(like.key, entry(like, parts=parts)), Saved)


MAX = {"max_autotune": "False → True"}
TUNED = lookup("ab", 1, "hit", reason="local", of={"inductor_config": "tuned"})


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "unrecorded"])
@pytest.mark.parametrize("place", ["the local tier", "the remote"])
def test_an_entry_is_compared_by_its_details(tmp_path: Path, place: str, recorded: bool) -> None:
    """Records of hits have none; an entry counts whether or not its lookup was recorded."""
    remote, local = Shelf(tmp_path / "remote"), tmp_path / "local"
    if place == "the remote":
        remote.put(first_name(TUNED.key), entry(TUNED, parts={"inductor_config": MAX}))
    else:
        keep(local, TUNED, parts={"inductor_config": MAX})
    other = lookup("b", 1, of={"inductor_config": "x", "grad_enabled": "False"})
    missed = lookup("c", 2, of={"inductor_config": "as ever"})
    write(local, TUNED if recorded else other, missed)
    found = explain(url=remote.url, local_dir=str(local))
    one = found.explanations[-1]
    assert (one.entry, found.unasked) == ("ab", "")
    assert one.known_from.startswith("run " if recorded else place)
    assert [each.text for each in one.differences] == ["inductor.max_autotune True → False"]
    # Neither place is read where the caller says so.
    if not recorded:
        without = explain(url=remote.url, local_dir=str(local), remote=False, local=False)
        assert without.explanations[-1].entry == "b"


def test_a_damaged_untrusted_or_newer_entry_is_skipped(tmp_path: Path) -> None:
    keep(tmp_path, TUNED, parts={})
    miss = lookup("c", 2, of={"inductor_config": "as ever"})
    write(tmp_path, miss)
    signer = generate("mine")
    trusted = explain(
        local_dir=str(tmp_path), trust="require", trusted_keys=f"team={signer.public_text()}"
    )
    assert trusted.explanations[0].entry == ""
    assert explain(local_dir=str(tmp_path)).explanations[0].entry == "ab"
    (file,) = (path for path in tmp_path.glob("objects/**/ab*") if path.is_file())
    data = bytearray(file.read_bytes())
    data[70] ^= 1
    file.write_bytes(data)
    assert explain(local_dir=str(tmp_path)).explanations[0].entry == ""
    file.unlink()
    keep(tmp_path, replace(TUNED, time=3.0), parts={})
    assert explain(local_dir=str(tmp_path)).explanations[0].entry == ""


def test_only_the_256_entries_used_last_are_read(tmp_path: Path) -> None:
    with Cache.open(local_dir=str(tmp_path)) as cache:
        for number in range(256):
            key = f"e{number:03x}"
            cache.save(key, frame.encode(kind="other", key=key, sections={}))
    keep(tmp_path, TUNED, parts={})
    write(tmp_path, lookup("c", 2, of={"inductor_config": "as ever"}))
    assert explain(local_dir=str(tmp_path)).explanations[0].entry == "ab"
    (file,) = (path for path in tmp_path.glob("objects/**/ab*") if path.is_file())
    os.utime(file, (1.0, 1.0))
    assert explain(local_dir=str(tmp_path)).explanations[0].entry == ""


# -- entries of the remote


def test_untrusted_entries_of_the_remote_are_skipped(tmp_path: Path) -> None:
    remote, local = Shelf(tmp_path / "remote"), str(tmp_path / "local")
    write(tmp_path / "local", lookup("c", 2, of={"inductor_config": "as ever"}))
    remote.put(first_name(TUNED.key), entry(TUNED))
    keys = f"team={generate('mine').public_text()}"
    signed = explain(url=remote.url, local_dir=local, trust="require", trusted_keys=keys)
    assert signed.explanations[0].entry == ""


async def test_a_large_remote_takes_few_requests() -> None:
    """As the page says: 8 pages of a listing, and 256 headers."""
    store = CountingStore(MemoryStore())
    for number in range(20_000):
        if number == 7_999:
            await store.inner.put(first_name(TUNED.key), entry(TUNED))
        await store.inner.put(f"{NAMES}fff/a{number:064x}.0", b"")
    place = Place(store, False, policy_of(None, "", "", audience=""))
    source = EntrySource("the remote", lambda: place)
    neighbors = await asyncio.to_thread(lambda: source.neighbors)
    assert [each.record.key for each in neighbors] == [TUNED.key]
    assert source.problem == ""
    assert store.counts == {"list": 8, "get_range": 256}


def test_a_remote_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    write(tmp_path / "local", lookup("c", 2))
    found = explain(url=f"file://{tmp_path}/absent", local_dir=str(tmp_path / "local"))
    assert found.explanations[0].entry == ""
    assert found.unasked
    assert f"the remote could not be read: {found.unasked}" in str(found)


class CountingStore(WrapperStore):
    """Counts requests as S3 has them: a listing takes one for each thousand names."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self.counts: Counter[str] = Counter()

    async def _around(self, verb: str, key: str, call: Any) -> Any:
        self.counts[verb] += 1
        return await call()

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        seen = 0
        async for info in self.inner.list(prefix):
            self.counts["list"] += seen % 1000 == 0
            seen += 1
            yield info


# -- a run


def test_other_runs_of_the_machine_are_compared(tmp_path: Path) -> None:
    first = write(tmp_path, lookup("a", 1, of={"torch.version": "2.11.0"}))
    second = write(tmp_path, lookup("b", 2))
    for run in (second, None):
        found = (
            explain(run, local_dir=str(tmp_path))
            if run
            else explain(key="b", local_dir=str(tmp_path))
        )
        (one,) = found.explanations
        assert (one.entry, one.known_from) == ("a", f"run {first}")
        assert [each.text for each in one.differences] == ["torch 2.11.0 → 2.12.1"]
    (one,) = explain(first, local_dir=str(tmp_path)).explanations
    assert one.entry == ""


def test_fx_graphs_of_a_graph_that_missed_are_not_explained_again(tmp_path: Path) -> None:
    write(tmp_path, lookup("a", 1), lookup("b", 2, level="fx", of_whole=True))
    assert [each.record.key for each in explain(local_dir=str(tmp_path)).explanations] == ["a"]


def test_everything_foreign_is_shown_as_printable_text(tmp_path: Path) -> None:
    """Also where an object is shown by its ``repr``, as IPython does."""
    hostile = "\x1b[31m"
    where = (hostile, 3, "step")
    write(
        tmp_path,
        lookup("a", 1, of={"gm": hostile}),
        lookup("b", 2, where=where, rejected=(hostile,)),
        lookup("c", 3, "bypass", reasons=({"message": hostile, "code": "x", "fix": hostile},)),
    )
    found = explain(local_dir=str(tmp_path))
    for each in (found, *found.explanations):
        assert repr(each) == str(each)
        assert hostile not in str(each)
    assert str(found).count("\\x1b[31m") >= 5


def test_a_notebook_shows_what_can_be_cached_as_a_table() -> None:
    unsafe = BypassReason("function", "calls <b>", fix="import x")
    graphs = (Graph(3, "abc", {}, (), "local"), Graph(2, None, {}, (unsafe,)))
    report = Report(graphs, (GraphBreak("print", "x.py:1"),))
    shown_by: list[str] = []
    methodcaller("_repr_pretty_", SimpleNamespace(text=shown_by.append), False)(report)  # IPython
    assert shown_by == [str(report)]
    page: str = methodcaller("_repr_html_")(report)
    for shown in ("1 of 2 graphs", "key abc, local", "calls &lt;b&gt;", "import x", "x.py:1"):
        assert shown in page
    assert "<b>" not in page


def test_hits_are_counted(tmp_path: Path) -> None:
    write(tmp_path, lookup("a", 1, "hit", reason="local"), lookup("b", 2))
    found = explain(local_dir=str(tmp_path))
    assert found.hits == 1
    assert str(found).splitlines()[0].endswith(": 1 hit, 1 missed, 0 bypassed")
    assert explain(key="a", local_dir=str(tmp_path)).explanations == ()


@pytest.mark.parametrize("reason", ["guard", "timeout", "untrusted"])
def test_only_absent_entries_are_compared(tmp_path: Path, reason: str) -> None:
    write(tmp_path, lookup("a", 1, of={"gm": "h"}), lookup("b", 2, reason=reason))
    one = explain(local_dir=str(tmp_path)).explanations[-1]
    assert one.why
    assert not one.differences


def test_a_bypass_has_its_reasons_lines_and_fixes(tmp_path: Path) -> None:
    reason = {
        "code": "function",
        "message": "calls mine",
        "fix": "vouch",
        "node": "mine",
        "line": "m.py:3",
    }
    write(
        tmp_path,
        Record(
            "aot",
            "bypass",
            reason="function",
            time=1.0,
            where=("t.py", 7, "main"),
            reasons=(reason,),
        ),
    )
    text = str(explain(local_dir=str(tmp_path)))
    for words in ("t.py:7 in main", "mine: calls mine (function)", "m.py:3", "fix: vouch"):
        assert words in text


def test_without_records_the_error_names_the_fix(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run a program"):
        explain(local_dir=str(tmp_path))
    write(tmp_path, lookup("a", 1))
    with pytest.raises(ConfigError, match="no"):
        explain("19990101", local_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="records"):
        explain(key="b", local_dir=str(tmp_path))
