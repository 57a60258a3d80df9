"""What an entry says of its graph is all that torch's metadata says, and can be read without torch.

``tests/kinds`` compares the description of every kind of graph with torch's own object.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.source import AttrSource, LocalSource
from torch._functorch._aot_autograd import schemas
from torch.testing._internal.two_tensor import TwoTensor

from s3cache import frame
from s3cache.artifact import (
    GraphDescription,
    InputAliasInfo,
    Thing,
    ViewAndMutationMeta,
    described,
    description,
    packed,
    to_plain,
)
from s3cache.errors import CorruptError
from tests.support.descriptions import differences_from_torch
from tests.support.pages import ROOT

ODD = [
    *(None, True, 1, 1 << 70, 0.5, "text", b"\xff", torch.float32, torch.device("meta")),
    *(torch.channels_last, TwoTensor, frozenset({1, 2}), object, {3: "by number"}),
    {"nested": [(), {"": {}}]},
]


def made(name: str, **values: Any) -> Any:
    """Return an object of a class of torch's with these attributes, whatever else it needs."""
    theirs = object.__new__(getattr(schemas, name))
    vars(theirs).update(values)
    return theirs


def metadata() -> Any:
    layout = made("MemoryFormatMeta", size=torch.Size([2, 3]), memory_format=torch.channels_last)
    plain = made("PlainTensorMeta", unwrapped_idx=2, size_symbol_placeholders=(True, False))
    inner = made("SubclassCreationMeta", attrs={"a": plain}, meta=ODD, memory_format=layout)
    outer = made("SubclassCreationMeta", attrs={"b": inner, "c": plain}, outer_size=(2, None))
    output = made(
        "OutputAliasInfo",
        output_type=schemas.OutputType.is_input,
        raw_type=TwoTensor,
        dynamic_dims={0, 1},
    )
    return made(
        "ViewAndMutationMeta",
        input_info=[made("InputAliasInfo", is_leaf=True, mutates_data=False)],
        output_info=[output],
        num_intermediate_bases=1,
        traced_tangents=[torch.ones(2, 3)],
        subclass_inp_meta=[plain, outer],
        static_input_indices=[0, 3],
        tokens={0: torch.empty(0)},
        bw_donated_idxs=None,
        graphsafe_rng_device=torch.device("cpu"),
        act_input_paths=[(1, ("a", "b"))],
    )


def config() -> Any:
    name = "CacheableAOTConfig" if hasattr(schemas, "CacheableAOTConfig") else "AOTConfig"
    sources = [AttrSource(LocalSource("x"), "weight")]
    return made(name, num_params_buffers=2, aot_autograd_arg_pos_to_source=sources)


def subclasses() -> Any:
    plain = made("PlainTensorMeta", unwrapped_idx=2)
    return made("SubclassMeta", fw_metadata=metadata(), grad_input_metas=[plain])


FIELDS = {"runtime_metadata": metadata, "aot_config": config, "maybe_subclass_meta": subclasses}


def framed(content: object) -> bytes:
    """Return an entry with this in the place of its description."""
    return frame.encode(kind="aot", key="abc", sections={}, meta={"runtime": content})


def read(content: object) -> GraphDescription:
    found = description(frame.decode_header(framed(content)))
    assert found is not None
    return found


def written(plain: object) -> bytes:
    return zlib.compress(msgpack.packb(plain))


# -- what is said


@pytest.mark.parametrize("field", FIELDS)
def test_a_description_says_what_torch_says(field: str) -> None:
    """Each attribute of torch's object, typed, and again after a round trip through bytes."""
    theirs = FIELDS[field]()
    plain = {"class": "GraphDescription", field: described(theirs)}
    whole = read(written(plain))
    assert [*differences_from_torch(getattr(whole, field), theirs)] == []
    assert read(packed(whole)) == whole


def test_what_a_newer_torch_adds_is_kept_by_name() -> None:
    """New fields, and known ones with values that are not known: there, and after a round trip."""
    theirs = metadata()
    theirs.spin = {"up": [1, 2]}
    theirs.deterministic = "mostly"
    whole = read(written({"class": "GraphDescription", "runtime_metadata": described(theirs)}))
    ours = whole.runtime_metadata
    assert ours.deterministic is None
    assert ours.extra == {"deterministic": "mostly", "spin": {"up": (1, 2)}}
    assert read(packed(whole)) == whole


def test_what_a_newer_s3cache_writes_is_kept_by_name() -> None:
    info = {"class": "InputAliasInfo", "is_leaf": True, "warm": 1.5}
    metadata = {
        "act_input_indices": [2],
        "input_info": [info],
        "later": {"class": "New", "spin": 1},
    }
    plain = {
        "class": "GraphDescription",
        "runtime_metadata": {"class": "ViewAndMutationMeta", **metadata},
        "later": [1],
    }
    found = read(written(plain))
    assert found.runtime_metadata.act_input_indices == (2,)
    assert found.runtime_metadata.input_info == (InputAliasInfo(is_leaf=True, extra={"warm": 1.5}),)
    assert found.runtime_metadata.extra == {"later": Thing(type="New", fields={"spin": 1})}
    assert found.extra == {"later": (1,)}
    assert to_plain(found) == plain | {"dispatch_wrappers": []} | {
        "runtime_metadata": to_plain(found.runtime_metadata)
    }


@pytest.mark.parametrize(
    "change",
    [
        {"num_intermediate_bases": "two"},
        {"num_intermediate_bases": True},
        {"input_info": [{"class": "OutputAliasInfo"}]},
        {"input_info": {"class": "InputAliasInfo"}},
        {"subclass_inp_meta": [{}]},
        {"graphsafe_rng_device": 0},
    ],
)
def test_a_field_of_another_type_is_in_extra(change: dict[str, Any]) -> None:
    """So that each field is of the type that it is declared with, whatever wrote it."""
    metadata = {"class": "ViewAndMutationMeta", **change}
    found = read(written({"class": "GraphDescription", "runtime_metadata": metadata}))
    assert set(found.runtime_metadata.extra) == set(change)
    assert ViewAndMutationMeta(extra=found.runtime_metadata.extra) == found.runtime_metadata


def test_a_description_too_large_for_a_header_is_left_out() -> None:
    noise = tuple(str(hash(("noise", n))) * 4 for n in range(20_000))
    assert packed(GraphDescription(dispatch_wrappers=noise)) is None


def test_the_page_names_every_class_that_torch_has() -> None:
    """Each is described here, or left out for a reason."""
    theirs = {
        name
        for name, value in vars(schemas).items()
        if isinstance(value, type) and value.__module__ == schemas.__name__
    }
    page = (ROOT / "docs" / "metadata.md").read_text(encoding="utf-8")
    assert [name for name in sorted(theirs) if f"`{name}`" not in page] == []


# -- who can read it

# torch must not even be found, and nothing may be unpickled.
_READER = """
import json, pickle, sys
sys.modules["torch"] = None
def refuse(event, arguments):
    if event == "pickle.find_class":
        raise RuntimeError("unpickled " + repr(arguments))
sys.addaudithook(refuse)
from s3cache import frame
from s3cache.artifact import description, to_plain
header = frame.decode_header(open(sys.argv[1], "rb").read())
print(json.dumps(to_plain(description(header)), default=repr))
"""


def test_an_entry_can_be_read_without_torch(tmp_path: Path) -> None:
    plain = {"class": "GraphDescription", "runtime_metadata": described(metadata())}
    whole = read(written(plain))
    (tmp_path / "entry").write_bytes(framed(packed(whole)))
    command = [sys.executable, "-W", "ignore", "-c", _READER, str(tmp_path / "entry")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == json.dumps(to_plain(whole), default=repr) + "\n"


# -- what is refused


@given(position=st.integers(0), bit=st.integers(0, 7))
def test_damage_is_a_corrupt_entry_or_still_a_description(position: int, bit: int) -> None:
    whole = GraphDescription(
        runtime_metadata=ViewAndMutationMeta(input_info=(InputAliasInfo(is_leaf=True),))
    )
    content = bytearray(packed(whole) or b"")
    content[position % len(content)] ^= 1 << bit
    with contextlib.suppress(CorruptError):
        assert isinstance(read(bytes(content)), GraphDescription)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"no zlib", 1, written({})[:-1], written({}) + b"more", written([]), written(1)),
        written({"class": "ViewAndMutationMeta"}),
        zlib.compress(bytes(65 << 20)),
    ],
    ids=range(9),
)
def test_what_is_no_description_is_refused(content: object) -> None:
    """Whatever it is; and what claims to be enormous is not read."""
    with pytest.raises(CorruptError):
        read(content)
