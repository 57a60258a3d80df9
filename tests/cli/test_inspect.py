"""``s3cache inspect``."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from s3cache import frame
from s3cache.artifact import (
    AOTConfig,
    GraphDescription,
    InputAliasInfo,
    OutputAliasInfo,
    Source,
    ViewAndMutationMeta,
    packed,
)
from s3cache.entries import first_name
from tests.cli.commands import Call
from tests.support.imports import modules_after
from tests.support.shelves import Shelf, path_of

KEY = "ab" * 16


@pytest.fixture
def name(shelf: Shelf) -> str:
    """An entry of a graph; its pickle is none, and would not load."""
    description = GraphDescription(
        runtime_metadata=ViewAndMutationMeta(
            input_info=(
                InputAliasInfo(mutates_data=True, mutation_type="MUTATED_IN_GRAPH"),
                InputAliasInfo(requires_grad=True),
            ),
            output_info=(OutputAliasInfo(output_type="alias_of_input", base_idx=0),),
        ),
        aot_config=AOTConfig(aot_autograd_arg_pos_to_source=(Source(name="L['x']"), None)),
    )
    data = frame.encode(
        kind="aot",
        key=KEY,
        schema=2,
        sections={"entry": b"no pickle", "kernel/abc": b"x" * 3000},
        meta={
            "guards": "s0 > 3",
            "times_ns": [1_500_000_000, 250_000_000],
            "runtime": packed(description),
            "components": {"torch.version": ["d1", "2.13.0+cpu"], "gm": ["d2", "graph of 7 nodes"]},
            "made_by": {"torch": "2.13.0+cpu", "compiler": "gcc version 12"},
        },
    )
    return shelf.put(first_name(KEY), data)


def test_all_that_an_entry_says_by_key_file_and_url(call: Call, shelf: Shelf, name: str) -> None:
    ways = [
        [KEY, "--url", shelf.url],
        [KEY[:9], "--url", shelf.url],
        [str(path_of(shelf.files, name))],
        [f"{shelf.url}/{name}"],
        [f"{shelf.url}/{name}?create=false"],
    ]
    for way in ways:
        done = call("inspect", *way, "--json")
        assert done.code == 0, done.err
        found = done.json
        assert (found["kind"], found["key"], found["guards"]) == ("aot", KEY, "s0 > 3")
        assert found["times_s"] == [1.5, 0.25]
        assert found["components"]["gm"] == ["d2", "graph of 7 nodes"]
        assert [each["name"] for each in found["sections"]] == ["entry", "kernel/abc"]
        assert found["graph"]["runtime_metadata"]["input_info"][0]["mutates_data"] is True
        assert found["trust"] == "not asked for here"
        assert len(found["digest"]) == 64


def test_people_read_what_the_graph_does(call: Call, shelf: Shelf, name: str) -> None:
    text = call("inspect", KEY, "--url", shelf.url).out
    for words in (
        KEY,
        "1.5, 0.25",
        "s0 > 3",
        "gcc version 12",
        "kernel/abc",
        "graph of 7 nodes",
        "MUTATED_IN_GRAPH",
        "requires grad",
        "alias_of_input",
    ):
        assert words in text
    assert "L['x']" in text


def test_torch_is_not_needed_and_nothing_is_unpickled(shelf: Shelf, name: str) -> None:
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


def test_what_is_damaged_or_not_there_is_said(call: Call, shelf: Shelf, tmp_path: Path) -> None:
    shelf.add("aa1")
    shelf.add("aa2")
    damaged = shelf.add("bad")
    shelf.damage(damaged, at=70)
    (tmp_path / "text").write_text("hello")
    cases: list[tuple[list[object], int, str]] = [
        (["bad", "--url", shelf.url], 1, "digest"),
        (["nothing", "--url", shelf.url], 1, "there is no such entry"),
        ([f"{shelf.url}/v1/000/nothing.0"], 1, "there is no such entry"),
        (["aa", "--url", shelf.url], 2, "the beginning of several"),
        ([tmp_path / "text"], 1, "not that of a frame"),
        ([tmp_path / "missing"], 2, "cannot be read"),
        ([shelf.url], 2, "is not that of an entry"),
        (["s3://AKIA:hunter2@bucket/v1/000/k.0"], 2, "user name, a password"),
    ]
    for arguments, code, said in cases:
        done = call("inspect", *arguments)
        assert (done.code, done.out) == (code, ""), done.err
        assert said in done.err
        assert len(done.err.splitlines()) == 1
        assert "hunter2" not in done.err
        assert ("explain" in done.err) == (said != "there is no such entry")


def test_whatever_a_header_says_it_is_shown(call: Call, shelf: Shelf) -> None:
    """Others have written it: types that we never write are no reason to fail."""
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


@pytest.mark.parametrize("command", [["inspect"], ["ls", "--manifest"], ["verify", "--manifest"]])
def test_what_is_no_regular_file_is_refused_at_once(
    command: list[str],
    call: Call,
    shelf: Shelf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pipe without a writer would be waited for, and a device may never end."""
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    os.mkfifo("pipe")
    (tmp_path / "directory").mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        for path in ("./pipe", "./directory", "./socket", "/dev/zero"):
            done = call(*command, path, "--url", shelf.url)
            assert (done.code, path in done.err) == (2, True)
            assert "is no regular file" in done.err or "cannot be read" in done.err
            assert "Traceback" not in done.err
