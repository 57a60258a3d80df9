"""What an entry says of its graph is all that torch's metadata says, and can be read elsewhere."""

from __future__ import annotations

import zlib
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch._functorch._aot_autograd import schemas

from s3cache.artifact import (
    AOTConfig,
    Backward,
    GraphDescription,
    InputAliasInfo,
    OutputAliasInfo,
    SubclassMeta,
    Thing,
    ViewAndMutationMeta,
    packed,
    unpacked,
)
from s3cache.artifact._describe import described
from tests.artifact.metadata import changed, configs, metadata, signatures
from tests.support.density import examples
from tests.support.descriptions import differences_from_torch
from tests.support.pages import ROOT

# To shrink such objects takes minutes; what is wrong is told by its place in them.
without_shrinking = settings(phases=[Phase.explicit, Phase.reuse, Phase.generate])
CLASSES: dict[str, Any] = {
    "metadata": ViewAndMutationMeta,
    "config": AOTConfig,
    "subclasses": SubclassMeta,
}
OBJECTS: dict[str, Any] = {"metadata": metadata(), "config": configs, "subclasses": signatures()}
PLACES = {
    "metadata": "runtime_metadata",
    "config": "aot_config",
    "subclasses": "maybe_subclass_meta",
}


def as_bytes(of: str, theirs: Any) -> bytes:
    """What the header of an entry with this object would hold."""
    given: dict[str, Any] = {PLACES[of]: described(CLASSES[of], theirs)}
    content = packed(GraphDescription(**given))
    assert content is not None
    return content


@pytest.mark.parametrize("of", OBJECTS)
@without_shrinking
@given(data=st.data())
def test_a_description_says_what_torch_says(of: str, data: st.DataObject) -> None:
    """Each attribute of torch's object, typed, and again after a round trip through bytes."""
    theirs = data.draw(OBJECTS[of])
    ours = described(CLASSES[of], theirs)
    assert [*differences_from_torch(ours, theirs)] == []
    back = getattr(unpacked(as_bytes(of, theirs)), PLACES[of])
    assert back == ours
    assert [*differences_from_torch(back, theirs)] == []


@without_shrinking
@given(theirs=metadata())
def test_slices_of_what_is_saved_are_torchs(theirs: Any) -> None:
    ours = described(ViewAndMutationMeta, theirs)
    names = [name for name in dir(ViewAndMutationMeta) if name.endswith("_slice")]
    names = [name for name in names if not name.startswith("_") and hasattr(type(theirs), name)]
    assert len(names) >= 4
    for name in names:
        try:
            expected = getattr(theirs, name)
        except AssertionError:  # it does not know how much is saved
            expected = None
        assert getattr(ours, name) == expected, name


def test_the_page_names_every_class_that_torch_has() -> None:
    """Each is described here, or left out for a reason."""
    theirs = {
        name
        for name, value in vars(schemas).items()
        if isinstance(value, type) and value.__module__ == schemas.__name__
    }
    page = (ROOT / "docs" / "metadata.md").read_text(encoding="utf-8")
    assert [name for name in sorted(theirs) if f"`{name}`" not in page] == []


def test_the_loss_is_the_only_output_with_a_gradient() -> None:
    def signature(outputs: list[OutputAliasInfo], tangents: int) -> Any:
        metadata = ViewAndMutationMeta(
            output_info=tuple(outputs), traced_tangents=(None,) * tangents
        )
        return GraphDescription(runtime_metadata=metadata, backward=Backward()).backward_signature

    loss = OutputAliasInfo(output_type="non_alias", requires_grad=True)
    logits = OutputAliasInfo(output_type="non_alias", requires_grad=False)
    assert signature([logits, loss], 1).loss_output == 1
    assert signature([loss, loss], 2).loss_output is None
    assert signature([loss], 2).loss_output is None  # a mutated input has a gradient too
    assert signature([logits], 1).loss_output is None


@pytest.mark.parametrize("of", OBJECTS)
@settings(without_shrinking, max_examples=examples(0.2))
@given(data=st.data())
def test_metadata_that_differ_describe_differently(of: str, data: st.DataObject) -> None:
    """Whichever attribute is changed, removed or added, of the object or of what it holds."""
    theirs = data.draw(OBJECTS[of])
    described_as = as_bytes(of, theirs)
    alike = [where for where, other in changed(theirs) if as_bytes(of, other) == described_as]
    assert alike == []
    assert as_bytes(of, theirs) == described_as


@settings(without_shrinking, max_examples=examples(0.2))
@given(data=st.data())
def test_what_a_newer_torch_adds_is_kept_by_name(data: st.DataObject) -> None:
    """New fields, and known ones with values that are not known: there, and after a round trip."""
    theirs = data.draw(metadata())
    theirs.spin = {"up": [1, 2]}
    theirs.deterministic = "mostly"
    ours = described(ViewAndMutationMeta, theirs)
    assert ours.deterministic is None
    assert ours.extra["deterministic"] == "mostly"
    assert set(ours.extra) == {"deterministic", "spin"}
    whole = GraphDescription(runtime_metadata=ours)
    content = packed(whole)
    assert content is not None
    assert unpacked(content) == whole


def test_what_a_newer_s3cache_writes_is_kept_by_name() -> None:
    info = {"type": "InputAliasInfo", "fields": {"is_leaf": True, "warm": 1.5}}
    metadata = {"num_outputs": 2, "input_info": [info], "later": {"type": "New", "fields": {}}}
    plain = {
        "type": "GraphDescription",
        "fields": {
            "runtime_metadata": {"type": "ViewAndMutationMeta", "fields": metadata},
            "later": [1],
        },
    }
    read = unpacked(zlib.compress(msgpack.packb(plain)))
    assert read.runtime_metadata.num_outputs == 2
    assert read.runtime_metadata.input_info == (InputAliasInfo(is_leaf=True, extra={"warm": 1.5}),)
    assert read.runtime_metadata.extra == {"later": Thing("New", fields={})}
    assert read.extra == {"later": (1,)}
