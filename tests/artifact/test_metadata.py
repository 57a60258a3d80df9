"""What an entry says of its graph is all that torch's metadata says, and can be read elsewhere."""

from __future__ import annotations

import zlib
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest
from torch._functorch._aot_autograd import schemas

from s3cache.artifact import (
    AOTConfig,
    GraphDescription,
    InputAliasInfo,
    SubclassMeta,
    Thing,
    ViewAndMutationMeta,
    packed,
    unpacked,
)
from s3cache.artifact._describe import described
from tests.artifact.metadata import changed, config, metadata, subclasses
from tests.support.descriptions import differences_from_torch
from tests.support.pages import ROOT

# The class that describes an object of torch, and the field of the description that holds it.
KINDS: dict[str, tuple[Any, str, Any]] = {
    "metadata": (ViewAndMutationMeta, "runtime_metadata", metadata),
    "config": (AOTConfig, "aot_config", config),
    "subclasses": (SubclassMeta, "maybe_subclass_meta", subclasses),
}


def as_bytes(kind: str, theirs: Any) -> bytes:
    """Return what the header of an entry with this object would hold."""
    cls, field, _ = KINDS[kind]
    given: dict[str, Any] = {field: described(cls, theirs)}
    content = packed(GraphDescription(**given))
    assert content is not None
    return content


@pytest.mark.parametrize("kind", KINDS)
def test_a_description_says_what_torch_says(kind: str) -> None:
    """Each attribute of torch's object, typed, and again after a round trip through bytes."""
    cls, field, make = KINDS[kind]
    theirs = make()
    ours = described(cls, theirs)
    assert [*differences_from_torch(ours, theirs)] == []
    back = getattr(unpacked(as_bytes(kind, theirs)), field)
    assert back == ours
    assert [*differences_from_torch(back, theirs)] == []


@pytest.mark.parametrize("kind", KINDS)
def test_metadata_that_differ_describe_differently(kind: str) -> None:
    """Whichever attribute is changed, removed or added, of the object or of what it holds."""
    theirs = KINDS[kind][2]()
    described_as = as_bytes(kind, theirs)
    changes = dict(changed(theirs))
    assert len(changes) >= 15
    alike = [where for where, other in changes.items() if as_bytes(kind, other) == described_as]
    assert alike == []
    assert as_bytes(kind, theirs) == described_as


def test_the_page_names_every_class_that_torch_has() -> None:
    """Each is described here, or left out for a reason."""
    theirs = {
        name
        for name, value in vars(schemas).items()
        if isinstance(value, type) and value.__module__ == schemas.__name__
    }
    page = (ROOT / "docs" / "metadata.md").read_text(encoding="utf-8")
    assert [name for name in sorted(theirs) if f"`{name}`" not in page] == []


def test_what_a_newer_torch_adds_is_kept_by_name() -> None:
    """New fields, and known ones with values that are not known: there, and after a round trip."""
    theirs = metadata()
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
