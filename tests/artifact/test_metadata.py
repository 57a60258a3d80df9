"""An entry describes its graph as fully as torch's metadata, and can be read without torch.

``tests/equal/kinds`` compares the description of every kind of graph with torch's own object.
"""

from __future__ import annotations

import contextlib
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
from s3cache.artifact import described, description, inputs_and_outputs
from s3cache.errors import CorruptError
from tests.support.descriptions import differences_from_torch
from tests.support.pages import ROOT
from tests.support.scripts import python

ODD = [
    *(None, True, 1, 1 << 70, 0.5, "text", b"\xff", torch.float32, torch.device("meta")),
    *(torch.channels_last, TwoTensor, frozenset({1, 2}), object, {3: "by number"}),
    {"nested": [(), {"": {}}]},
]


def made(name: str, **values: Any) -> Any:
    """Return an object of a torch class with these attributes only."""
    instance = object.__new__(getattr(schemas, name))
    vars(instance).update(values)
    return instance


def metadata() -> Any:
    layout = made("MemoryFormatMeta", size=torch.Size([2, 3]), memory_format=torch.channels_last)
    plain = made("PlainTensorMeta", unwrapped_idx=2, size_symbol_placeholders=(True, False))
    inner = made("SubclassCreationMeta", attrs={"a": plain}, meta=ODD, memory_format=layout)
    outer = made("SubclassCreationMeta", attrs={"b": inner, "c": plain}, outer_size=(2, None))
    kind = schemas.OutputType.is_input
    output = made("OutputAliasInfo", output_type=kind, raw_type=TwoTensor, dynamic_dims={0, 1})
    return made(
        "ViewAndMutationMeta",
        input_info=[made("InputAliasInfo", is_leaf=True, mutates_data=False)],
        output_info=[output],
        traced_tangents=[torch.ones(2, 3)],
        subclass_inp_meta=[plain, outer],
        tokens={0: torch.empty(0)},
        bw_donated_idxs=None,
        graphsafe_rng_device=torch.device("cpu"),
        act_input_paths=[(1, ("a", "b"))],
        of_a_newer_torch={"up": [1, 2]},
    )


def config() -> Any:
    name = "CacheableAOTConfig" if hasattr(schemas, "CacheableAOTConfig") else "AOTConfig"
    sources = [AttrSource(LocalSource("x"), "weight")]
    return made(name, num_params_buffers=2, aot_autograd_arg_pos_to_source=sources)


def framed(content: object) -> bytes:
    """Return an entry with ``content`` as its description."""
    return frame.encode(kind="aot", key="abc", sections={}, meta={"runtime": content})


def read(content: object) -> dict[str, Any]:
    found = description(frame.decode_head(framed(content)).header)
    assert found is not None
    return found


def written(plain: object) -> bytes:
    return zlib.compress(msgpack.packb(plain))


def whole() -> dict[str, object]:
    return {"runtime_metadata": described(metadata()), "sanitized_aot_config": described(config())}


def test_a_description_equals_torchs_metadata() -> None:
    """All attributes survive a round trip, including those that a newer torch adds."""
    found = read(written(whole()))
    assert [*differences_from_torch(found["runtime_metadata"], metadata())] == []
    assert [*differences_from_torch(found["sanitized_aot_config"], config())] == []
    assert found == whole()


def test_inputs_are_named_as_in_the_program() -> None:
    graph = whole()
    (name, details), (last, _) = inputs_and_outputs(graph)
    assert (name, last) == ("L['x'].weight", "output 0")
    assert isinstance(details, dict)
    assert details["is_leaf"] is True
    del graph["sanitized_aot_config"]
    assert inputs_and_outputs(graph)[0][0] == "input 0"


@pytest.mark.parametrize(
    "odd",
    [
        {},
        {"runtime_metadata": 1},
        {"runtime_metadata": {"input_info": 1}},
        {"sanitized_aot_config": {"aot_autograd_arg_pos_to_source": [1]}, "runtime_metadata": {}},
    ],
)
def test_a_graph_with_malformed_metadata_has_no_inputs(odd: dict[str, Any]) -> None:
    assert inputs_and_outputs(read(written(odd))) == []


# torch cannot be imported, and nothing may be unpickled.
_READER = """
import pickle, sys
sys.modules["torch"] = None
def refuse(event, arguments):
    if event == "pickle.find_class":
        raise RuntimeError("unpickled " + repr(arguments))
sys.addaudithook(refuse)
from s3cache import frame
from s3cache.artifact import description
print(description(frame.decode_head(open(sys.argv[1], "rb").read()).header))
"""


def test_an_entry_can_be_read_without_torch(tmp_path: Path) -> None:
    (tmp_path / "entry").write_bytes(framed(written(whole())))
    done = python("-W", "ignore", "-c", _READER, str(tmp_path / "entry"), cwd=ROOT)
    assert done.stdout == f"{whole()}\n", done.stderr


@given(position=st.integers(0), bit=st.integers(0, 7))
def test_a_damaged_description_is_corrupt_or_still_a_dict(position: int, bit: int) -> None:
    content = bytearray(written({"runtime_metadata": {"input_info": [{"is_leaf": True}]}}))
    content[position % len(content)] ^= 1 << bit
    with contextlib.suppress(CorruptError):
        assert isinstance(read(bytes(content)), dict)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"no zlib", 1, written({})[:-1], written({}) + b"more", written([]), written(1)),
        zlib.compress(b"\x91" * 5000 + b"\xc0"),
        zlib.compress(bytes(65 << 20)),
    ],
    ids=range(9),
)
def test_malformed_descriptions_are_refused(content: object) -> None:
    """A description that claims to be enormous is not read."""
    with pytest.raises(CorruptError):
        read(content)
