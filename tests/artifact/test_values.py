"""Bytes that are no description are refused, whatever they are."""

from __future__ import annotations

import contextlib
import zlib
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st

from s3cache.artifact import (
    GraphDescription,
    InputAliasInfo,
    ViewAndMutationMeta,
    packed,
    to_plain,
    unpacked,
)
from s3cache.errors import CorruptError

WHOLE = GraphDescription(
    runtime_metadata=ViewAndMutationMeta(input_info=(InputAliasInfo(is_leaf=True),), num_outputs=1)
)


def written(plain: object) -> bytes:
    return zlib.compress(msgpack.packb(plain))


@given(position=st.integers(0), bit=st.integers(0, 7))
def test_damage_is_a_corrupt_entry_or_still_a_description(position: int, bit: int) -> None:
    content = bytearray(packed(WHOLE) or b"")
    content[position % len(content)] ^= 1 << bit
    with contextlib.suppress(CorruptError):
        assert isinstance(unpacked(bytes(content)), GraphDescription)


@pytest.mark.parametrize(
    "content",
    [b"", b"no zlib", written({})[:-1], written({}) + b"more", written([]), written(1)],
)
def test_other_bytes_are_refused(content: bytes) -> None:
    with pytest.raises(CorruptError):
        unpacked(content)


METADATA = {"type": "ViewAndMutationMeta", "fields": {}}


@pytest.mark.parametrize(
    "change",
    [
        {"num_outputs": "two"},
        {"num_outputs": True},
        {"input_info": [{"type": "OutputAliasInfo", "fields": {}}]},
        {"input_info": {"type": "InputAliasInfo", "fields": {}}},
        {"subclass_inp_meta": [{"type": "map", "fields": {}}]},
        {"static_input_indices": {"type": "set", "items": [1]}},
        {"graphsafe_rng_device": "cpu"},
    ],
)
def test_a_field_of_another_type_is_in_extra(change: dict[str, Any]) -> None:
    """So that each field is of the type that it is declared with, whatever wrote it."""
    metadata = {**METADATA, "fields": change}
    plain = {"type": "GraphDescription", "fields": {"runtime_metadata": metadata}}
    read = unpacked(written(plain)).runtime_metadata
    assert set(read.extra) == set(change)
    assert ViewAndMutationMeta(extra=read.extra) == read


@pytest.mark.parametrize(
    "plain",
    [
        METADATA,
        {"type": "GraphDescription", "fields": [1]},
        {"type": "GraphDescription", "fields": {"later": {"of": "no type"}}},
        {"type": "GraphDescription", "fields": {"later": {"type": "set", "items": 5}}},
    ],
)
def test_what_is_malformed_is_refused(plain: dict[str, Any]) -> None:
    with pytest.raises(CorruptError):
        unpacked(written(plain))


def test_what_claims_to_be_enormous_is_refused_and_not_read() -> None:
    with pytest.raises(CorruptError):
        unpacked(zlib.compress(bytes(65 << 20)))
    deep: Any = 1
    for _ in range(400):
        deep = [deep]
    with pytest.raises(CorruptError):
        unpacked(written({"later": [deep] * 2, "runtime_metadata": deep}))


def test_what_is_not_said_takes_no_bytes() -> None:
    assert to_plain(GraphDescription()) == {
        "runtime_metadata": to_plain(ViewAndMutationMeta()),
        "dispatch_wrappers": [],
    }


def test_a_description_too_large_for_a_header_is_left_out() -> None:
    noise = tuple(str(hash(("noise", n))) * 4 for n in range(20_000))
    assert packed(GraphDescription(dispatch_wrappers=noise)) is None
