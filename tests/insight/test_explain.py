"""A miss is compared with the nearest entry, in words that users know, and a run is explained."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from s3cache import Cache, explain, frame
from s3cache.entries import NAMES, first_name
from s3cache.errors import ConfigError
from s3cache.insight import Explanation, differences
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


@pytest.mark.needs("single_flight")
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


def test_only_absent_entries_are_compared_and_a_bypass_has_its_reasons(tmp_path: Path) -> None:
    reasons = ("guard", "timeout", "untrusted")
    misses = (lookup(reason, at, reason=reason) for at, reason in enumerate(reasons, 2))
    why = {"code": "function", "message": "calls mine", "fix": "vouch", "node": "mine"}
    bypass: dict[str, Any] = {"where": ("t.py", 7, "main"), "reasons": ({**why, "line": "m.py:3"},)}
    record(tmp_path, lookup("a", 1, of={"gm": "h"}), *misses, lookup("", 9, "bypass", **bypass))
    found = explain(local_dir=str(tmp_path))
    assert all(each.why and not each.differences for each in found.explanations[1:])
    for words in ("t.py:7 in main", "mine: calls mine (function)", "m.py:3", "fix: vouch"):
        assert words in str(found)


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


def test_the_last_run_of_a_script_or_module_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path or its end finds the program, with any command and any later working directory."""
    monkeypatch.setenv("S3CACHE_LOCAL_DIR", str(tmp_path / "local"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    for number, (file, module) in enumerate(
        (
            ("train.py", ""),
            ("other/train.py", ""),
            ("package/job.py", "package.job"),
            ("package/__main__.py", "package.__main__"),
        )
    ):
        main = ModuleType("__main__")
        main.__file__ = str(tmp_path / file)
        main.__spec__ = ModuleSpec(module, None) if module else None
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "__main__", main)
            record(tmp_path / "local", lookup(f"k{number}", 1))

    def key(program: str) -> str:
        return explain(program).explanations[0].record.key

    assert key(str(tmp_path / "train.py")) == key("./train.py") == "k0"
    assert key("other/train.py") == "k1"
    assert key("package.job") == key("package/job.py") == key("job.py") == "k2"
    assert key("package") == key("") == "k3"
    with pytest.raises(ConfigError):  # not a complete name at the end of the path
        explain("rain.py")


A, B = "a" * 32, "b" * 32


def described(parts: dict[str, dict[str, str]] | None = None, **values: str) -> Record:
    """Return a record with components of these values and parts (``__`` is a dot in a name)."""
    texts = {name.replace("__", "."): value for name, value in values.items()}
    contents = {**texts, **{name: str(each) for name, each in (parts or {}).items()}}
    components = {
        name: (hashlib.sha256(content.encode()).hexdigest()[:32], texts.get(name, ""))
        for name, content in contents.items()
    }
    return Record("aot", "miss", components=components, parts=parts or {})


def texts(old: Record, new: Record) -> list[str]:
    return [each.text for each in differences(old, new)]


@pytest.mark.parametrize(
    ("name", "old", "new", "text"),
    [
        ("torch__version", "2.12.1", "2.13.0", "torch 2.12.1 → 2.13.0"),
        ("cache_key_tag", "", "blue", "torch.compiler.config.cache_key_tag none → blue"),
        ("torch__backends", "mkldnn=True cudnn.benchmark=False",
         "mkldnn=True cudnn.benchmark=True", "torch.backends.cudnn.benchmark False → True"),
        ("torch__attention", "priority=[0, 1] math=True", "priority=[1, 0] math=True",
         "torch.attention.priority [0, 1] → [1, 0]"),
        ("torch__precision", "='none' mkldnn='tf32'", "='ieee' mkldnn='tf32'",
         "fp32_precision 'none' → 'ieee'"),
        ("machine__isa", "avx avx2 avx512f fma", "avx avx2 fma",
         "CPU lacks avx512f"),
        ("machine__isa", "avx avx2", "avx2 vnni", "CPU lacks avx, also has vnni"),
        ("grad_enabled", "True", "False", "gradients enabled True → False"),
        ("of_tomorrow", "1", "2", "of_tomorrow 1 → 2"),
        ("custom_pass", A, B, "custom_pass has another definition"),
        ("inputs__sharing", "", "0@0 1@4", "inputs.sharing none → 0@0 1@4"),
        ("graph__operators", f"l.f: {A}", f"l.f: {B}",
         "custom operators: l.f has another definition"),
        ("graph__operators", "", f"l.f: {A}", "custom operators: l.f is new"),
        ("graph__operators", f"l.f: {A} l.g: {B}", f"l.g: {B}",
         "custom operators: l.f is missing"),
        ("graph__operators", "l.f version 1", "l.f version 2",
         "custom operators l.f version 1 → l.f version 2"),
    ],
)  # fmt: skip
def test_the_old_and_new_value_are_shown(name: str, old: str, new: str, text: str) -> None:
    assert texts(described(None, **{name: old}), described(None, **{name: new})) == [text]


def test_missing_options_are_shown_with_their_default() -> None:
    for old, new, expected in (
        ({}, {"max_autotune": "False → True"}, ["inductor.max_autotune False → True"]),
        ({"max_autotune": "False → True"}, {}, ["inductor.max_autotune True → False"]),
        ({"size": "64 → 7"}, {"size": "64 → 8"}, ["inductor.size 7 → 8"]),
        ({"a": "1 → 2"}, {"b": "None → 'x'"}, ["inductor.a 2 → 1", "inductor.b None → 'x'"]),
    ):
        pair = (described({"inductor_config": each}) for each in (old, new))
        assert texts(*pair) == expected


def test_equal_texts_with_different_digests_are_reported() -> None:
    for name in ("inductor_config", "gm"):
        old, new = (Record("aot", "miss", components={name: (it, "words")}) for it in (A, B))
        assert texts(old, new)[0].endswith("differs in a part that is not shown: words")
    code = {"gm": {"code": "def f(x): ..."}}
    (text,) = texts(replace(old, parts=code), replace(new, parts=code))
    assert text.startswith("graph: the same code")


def tensor(
    shape: str = "4, 64", stride: str = "64, 1", device: str = "'cpu'", grad: bool = False
) -> str:
    return (
        f"TensorMetadata(dtype=torch.float32, shape=torch.Size([{shape}]), stride=({stride}), "
        f"device=device(type={device}), layout=torch.strided, storage_offset=0, "
        f"memory_format=torch.contiguous_format, storage_bytes=None, requires_grad={grad})"
    )


def with_inputs(names: str, *inputs: str) -> Record:
    given = {str(number): each for number, each in enumerate(inputs)}
    sources = {"aot_autograd_arg_pos_to_source": names}
    return described({"aot_config": sources, "example_inputs": given})


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (tensor("4, 128", "128, 1"), "(4, 64) → (4, 128), not marked dynamic"),
        (tensor("s0, 64"), "(4, 64) → (s0, 64)"),
        (tensor("64"), "(4, 64) → (64,), not marked dynamic"),
        (tensor(stride="1, 4"), "stride (64, 1) → (1, 4)"),
        (tensor(device="'cuda', index=0"), "cpu → cuda:0"),
        (tensor(grad=True), "requires_grad False → True"),
    ],
)
def test_an_input_is_shown_by_its_name_and_its_difference(changed: str, text: str) -> None:
    names = "[L['self'].weight, L['x']]"
    old, new = (with_inputs(names, tensor(), each) for each in (tensor(), changed))
    assert texts(old, new) == [f"input 1 (L['x']): {text}"]
    assert texts(with_inputs("[L['x']]", tensor()), new)[0] == "inputs: 1 → 2"


def test_a_graph_is_shown_by_the_lines_that_differ() -> None:
    code = "def f(x):\n    y = x + {}\n    return y\n"
    old, new = (described({"gm": {"code": code.format(number)}}) for number in (1, 2))
    (found,) = differences(old, new)
    assert found.text == "graph: 1 node differs"
    shown = [" def f(x):", "-    y = x + 1", "+    y = x + 2", "     return y"]
    assert found.diff.splitlines()[1:] == shown


def test_differences_that_follow_from_others_come_last_and_are_marked() -> None:
    names = ("torch__version", "torch__build", "inductor_config", "grad_enabled")
    old, new = (described(None, **dict.fromkeys(names, number)) for number in ("1", "2"))
    assert [(each.component, each.follows) for each in differences(old, new)] == [
        *(("torch.version", False), ("grad_enabled", False)),
        *(("inductor_config", True), ("torch.build", True)),
    ]
    assert differences(old, old) == []
