"""``s3cache inspect``."""

from __future__ import annotations

import zlib
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest

from s3cache import frame
from s3cache.entries import first_name
from s3cache.trust import Algorithm, generate
from tests.cli.commands import Call
from tests.support.forging import signed_by
from tests.support.scripts import modules_after
from tests.support.shelves import Shelf, path_of

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
