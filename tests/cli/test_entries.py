"""``s3cache ls``, ``stats``, ``verify`` and ``inspect`` list, sum up, check and show entries."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest

from s3cache import frame
from s3cache.entries import first_name
from s3cache.records import Record
from s3cache.trust import Algorithm, generate
from tests.cli.commands import Call, save
from tests.support.forging import signed_by
from tests.support.runs import record
from tests.support.scripts import modules_after
from tests.support.shelves import Shelf, path_of

# -- ls


def test_ls_prints_a_line_for_each_entry(call: Call, shelf: Shelf) -> None:
    names = {shelf.add("aa" * 8, days=3), shelf.add("bb" * 8, variant="v2", first=False)}
    done = call("ls", "--url", shelf.url)
    assert done.code == 0
    assert len(done.out.splitlines()) == 2
    assert "3 d  " + "aa" * 8 + "  0" in done.out
    assert "bb" * 8 + "  v2" in done.out
    assert "2 entries" in done.err
    printed = call("ls", "--url", shelf.url, "--json")
    assert {each["name"] for each in printed.lines} == names
    assert printed.err == ""


def test_ls_filters_and_sorts_entries(call: Call, shelf: Shelf, tmp_path: Path) -> None:
    shelf.add("a1", size=10, days=9)
    name = shelf.add("a2", size=5000, torch="2.12.0", device="cpu cuda")
    shelf.put(name, signed_by(shelf.files.read(name) or b"", generate("ci")))
    shelf.add("b1", size=900, kind="other", days=1, tag="mine")
    record(tmp_path / "local", Record("aot", "hit", "a2"), Record("aot", "miss", "a1"))

    def keys(*arguments: str) -> list[str]:
        done = call("ls", "--url", shelf.url, "--json", *arguments)
        assert done.code == 0, done.err
        return [each["key"] for each in done.lines]

    assert keys("--sort", "size") == ["a2", "b1", "a1"]
    assert keys("--sort", "size", "--limit", "2") == ["a2", "b1"]
    assert keys("--sort", "torch") == keys("--sort", "kind", "--reverse") == ["a2", "a1", "b1"]
    assert [*keys("--sort", "key"), *keys("-r")] == ["a1", "a2", "b1", "a1", "b1", "a2"]
    assert keys("--sort", "age") == ["a2", "b1", "a1"]
    assert keys("--sort", "age", "--key", "a") == ["a2", "a1"]
    assert keys("--older", "2d") == ["a1"]
    assert keys("--newer", "2d", "--sort", "age") == ["a2", "b1"]
    assert keys("--min-size", "4KB") == keys("--device", "cuda") == keys("--signer", "ci") == ["a2"]
    assert keys("--max-size", "500B") == ["a1"]
    assert keys("--never-hit", "--sort", "age") == ["b1", "a1"]
    assert keys("--kind", "other") == keys("--tag", "mine") == ["b1"]
    assert keys("--torch", "2.12") == ["a2"]
    assert keys("--torch", "2.1") == keys("--kind", "test", "--older", "10d") == []
    assert len(keys("--limit", "1")) == 1


@pytest.mark.needs("job_profile")
def test_profiles_have_a_kind_and_do_not_count_as_never_hit(call: Call, shelf: Shelf) -> None:
    """Records do not contain the hits of profiles."""
    from s3cache.features.job_profile import KEYS as JOB_KEYS

    shelf.add(JOB_KEYS + "0" * 64, kind="job")
    (found,) = call("ls", "--url", shelf.url, "--json", "--kind", "job").lines
    assert found["key"] == JOB_KEYS + "0" * 64
    assert call("ls", "--url", shelf.url, "--json", "--never-hit").lines == []


def test_a_filter_without_matches_logs_a_warning(
    call: Call, shelf: Shelf, caplog: pytest.LogCaptureFixture
) -> None:
    shelf.add("a", torch="2.12.0")
    for command in ("ls", "stats", "verify", "rm"):
        done = call(command, "--url", shelf.url, "--kind", "tset", "--torch", "2.12", "--json")
        assert (done.code, done.err) == (0, "")
    assert caplog.messages == ["no entry has --kind tset"] * 4


def test_commands_that_only_read_create_no_directory(
    call: Call, shelf: Shelf, tmp_path: Path
) -> None:
    """A misspelt URL is an error, even with ``create=true``."""
    missing = tmp_path / "missing"
    for command in ("ls", "stats", "stats --by=size", "verify", "pull"):
        for url in (f"file://{missing}", f"file://{missing}?create=true"):
            done = call(*command.split(), "--url", url)
            assert done.code == 3, command
            assert str(missing) in done.err
    assert call("mirror", f"file://{missing}", shelf.url).code == 3
    assert not missing.exists()
    shelf.add("a")
    assert call("mirror", shelf.url, f"file://{missing}").code == 0
    assert missing.exists()


def test_long_lines_show_the_header_and_the_problem(call: Call, shelf: Shelf) -> None:
    """With ``--local``, entries of all remotes are listed."""
    for url in (None, f"{shelf.url}?create=1"):
        save(url)
    done = call("ls", "--local", "--json", "--long")
    assert [(each["key"], each["problem"]) for each in done.lines] == [("k", None), ("k", None)]
    shelf.add("good", kind="other", torch="2.12.1", tag="mine")
    shelf.damage(shelf.add("bad", size=999), at=70)
    bad, good, _ = call("ls", "--url", shelf.url, "--long", "--sort", "size").out.splitlines()
    assert "?" in bad
    assert "digest" in bad
    assert good.split()[4:] == ["other", "2.12.1", "-", "mine", "-", "good", "0"]


# -- stats


@pytest.mark.parametrize(
    ("by", "groups"),
    [
        ("age", {"below 1 day": 1, "below 7 days": 1, "30 days or more": 2}),
        ("kind", {"test": 2, "other": 1, "(not readable)": 1}),
        ("size", {"below 1 MiB": 4}),
        ("torch", {"2.13.0+cpu": 2, "2.12.0": 1, "(not readable)": 1}),
        ("tag", {"mine": 1, "(none)": 2, "(not readable)": 1}),
    ],
)
def test_entries_and_sizes_are_summed_up(
    call: Call, shelf: Shelf, by: str, groups: dict[str, int]
) -> None:
    shelf.add("a")
    shelf.add("b", days=5, kind="other", tag="mine")
    shelf.add("c", days=50, torch="2.12.0", size=70 << 10)
    name = shelf.add("d")
    shelf.damage(name, at=70)
    shelf.put(name, shelf.files.read(name) or b"", days=60)
    found = call("stats", "--by", by, "--url", shelf.url, "--json").json
    assert {each[by]: each["entries"] for each in found["groups"]} == groups
    assert found["entries"] == 4
    sizes = [each["bytes"] for each in found["groups"]]
    assert sum(sizes) == found["bytes"] == sum(info.size for info in shelf.files.walk())
    assert sizes == sorted(sizes, reverse=True)


# -- verify


def test_verify_finds_damage_in_any_part_of_an_entry(call: Call, shelf: Shelf) -> None:
    names = [shelf.add(f"key{number}", size=3000) for number in range(6)]
    done = call("verify", "--url", shelf.url)
    assert done.code == 0
    assert done.out.startswith("6 sound (")
    shelf.damage(names[0])  # in a section; the header is sound
    shelf.damage(names[1], at=70)
    shelf.put(names[2], (shelf.files.read(names[2]) or b"") + b"more")
    shelf.put(names[3], shelf.files.read(names[4]) or b"")
    done = call("verify", "--url", shelf.url, "--json")
    assert done.code == 1
    found = done.json
    assert (found["done"], found["failed"]) == (2, 4)
    assert {name for name, _ in found["failures"]} == {*names[:4]}
    text = call("verify", "--url", shelf.url)
    assert f"{names[0]}: section 'entry': its bytes do not match their digest" in text.out
    assert text.code == 1
    assert call("verify", "--url", shelf.url, "--key", "key4").code == 0


KEY = "ab" * 16


@pytest.fixture
def name(shelf: Shelf) -> str:
    """Add the entry of a graph, with an invalid pickle, and return its name."""
    description = {
        "runtime_metadata": {
            "input_info": [
                {"mutates_data": True, "mutation_type": "MUTATED_IN_GRAPH"},
                {"requires_grad": True},
            ],
            "output_info": [{"output_type": "alias_of_input", "base_idx": 0}],
        },
        "sanitized_aot_config": {"aot_autograd_arg_pos_to_source": [{"name": "L['x']"}, None]},
    }
    data = frame.encode(
        kind="aot",
        key=KEY,
        schema=2,
        sections={"entry": b"no pickle", "kernel/abc": b"x" * 3000},
        meta={
            "guards": "s0 > 3",
            "times_ns": [1_500_000_000, 250_000_000],
            "runtime": zlib.compress(msgpack.packb(description)),
            "components": {"torch.version": ["d1", "2.13.0+cpu"], "gm": ["d2", "graph of 7 nodes"]},
            "made_by": {"torch": "2.13.0+cpu", "compiler": "gcc version 12"},
        },
    )
    return shelf.put(first_name(KEY), data)


def test_inspect_shows_the_content_of_an_entry(call: Call, shelf: Shelf, name: str) -> None:
    url = f"{shelf.url}/{name}?create=false"
    for target in (KEY, KEY[:9], path_of(shelf.files, name), url):
        done = call("inspect", target, "--url", shelf.url, "--json")
        assert done.code == 0, done.err
        found = done.json
        assert (found["kind"], found["key"], found["guards"]) == ("aot", KEY, "s0 > 3")
        assert found["times_s"] == [1.5, 0.25]
        assert found["components"]["gm"] == ["d2", "graph of 7 nodes"]
        assert [each["name"] for each in found["sections"]] == ["entry", "kernel/abc"]
        assert found["graph"]["runtime_metadata"]["input_info"][0]["mutates_data"] is True
        assert found["trust"] == "not checked here"
        assert len(found["digest"]) == 64
    text = call("inspect", KEY, "--url", shelf.url).out
    for words in (
        *(KEY, "1.5, 0.25", "s0 > 3", "gcc version 12", "kernel/abc", "graph of 7 nodes"),
        *("MUTATED_IN_GRAPH", "requires_grad", "alias_of_input", "L['x']"),
    ):
        assert words in text


@pytest.mark.parametrize("algorithm", Algorithm)
def test_inspect_names_the_signer_and_the_algorithm(
    call: Call, shelf: Shelf, name: str, algorithm: Algorithm
) -> None:
    key = generate("ci", algorithm)
    shelf.put(name, signed_by(shelf.files.read(name) or b"", key))
    (found,) = call("inspect", KEY, "--url", shelf.url, "--json").json["signatures"]
    who = {"signer": "ci", "audience": "main", "issued_s": 1, "expires_s": 0}
    assert found == {**who, "algorithm": algorithm.name}


def test_inspect_needs_no_torch_and_unpickles_nothing(shelf: Shelf, name: str) -> None:
    code = f"""
import contextlib, io, pickle
def refuse(*_, **__):
    raise AssertionError("unpickled")
class Refusing(pickle.Unpickler):
    __init__ = refuse
pickle.load, pickle.loads, pickle.Unpickler = refuse, refuse, Refusing
from s3cache.cli import main
with contextlib.redirect_stdout(io.StringIO()):
    assert main(["inspect", {KEY!r}, "--url", {shelf.url!r}]) == 0
"""
    assert modules_after(f"exec({code!r})").isdisjoint({"torch", "botocore", "aiohttp", "numpy"})


def test_damaged_and_missing_entries_are_one_line_errors(call: Call, shelf: Shelf) -> None:
    shelf.add("aa1")
    shelf.add("aa2")
    shelf.damage(shelf.add("bad"), at=70)
    cases = [
        ("bad", 1, "digest"),
        ("nothing", 1, "there is no such entry"),
        ("aa", 2, "the beginning of several"),
        ("./nothing", 2, "is not a regular file"),
        (f"{shelf.url}/v1/0/gone.0", 1, "there is no such entry"),
        (f"{shelf.url}/gone", 2, "is not the URL of an entry"),
    ]
    for key, code, message in cases:
        done = call("inspect", key, "--url", shelf.url)
        assert (done.code, done.out) == (code, ""), done.err
        assert message in done.err
        assert len(done.err.splitlines()) == 1


def test_a_header_with_unexpected_types_is_shown(call: Call, shelf: Shelf) -> None:
    """Anyone may have written it, so types that we never write must not cause a failure."""
    odd: list[dict[str, Any]] = [
        {"times_ns": 5, "components": [1], "made_by": "me", "guards": 3},
        {"times_ns": ["x", None], "components": {"a": 1, "b": ["x"], "c": [1, 2]}},
        {"made_by": {"torch": ["2"]}, "relies_on": {"x": b"\xff"}},
    ]
    for number, meta in enumerate(odd):
        key = f"odd{number}"
        data = frame.encode(kind="other", key=key, sections={}, meta=meta)
        shelf.put(first_name(key), data)
        for json in ([], ["--json"]):
            assert call("inspect", key, "--url", shelf.url, *json).code == 0
        assert call("ls", "--long", "--url", shelf.url).code == 0
