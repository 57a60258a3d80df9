"""The frame under arbitrary input: it round-trips, finds any damage, and fails in one way only."""

from __future__ import annotations

import contextlib
import hashlib
import string
import struct
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from s3cache.errors import CorruptError, TruncatedError
from s3cache.frame import MAGIC, PRELUDE_BYTES, Header, decode, decode_header, encode
from tests.support.density import examples

NAMES = st.text(alphabet=[*string.printable[:95]], min_size=1, max_size=255)
# Runs as well as noise, so that some sections compress, some do not, and some would too well.
CONTENTS = st.one_of(
    st.binary(max_size=400),
    st.builds(lambda unit, times: unit * times, st.binary(max_size=64), st.integers(1, 5000)),
)
SECTIONS = st.dictionaries(NAMES, CONTENTS, max_size=6)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(),
    st.binary(max_size=50),
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=12
)
META = st.dictionaries(st.text(), VALUES, max_size=5)
FRAMES = st.builds(
    encode,
    kind=NAMES,
    key=NAMES,
    variant=st.just("") | NAMES,
    schema=st.integers(0, 2**32 - 1),
    sections=SECTIONS,
    meta=META,
    codec=st.sampled_from(["zstd", "none"]),
    created_ns=st.integers(0, 2**63 - 1),
)


def equal(one: Any, other: Any) -> bool:
    """Equal in value and type, dicts in order, floats (NaN, -0.0) in every bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, float):
        return struct.pack(">d", one) == struct.pack(">d", other)
    return bool(one == other)


def read_all(data: bytes) -> tuple[Header, dict[str, bytes]]:
    found = decode(data)
    found.verify()
    return found.header, {name: bytes(found.section(name)) for name in found.names}


@given(
    kind=NAMES, key=NAMES, variant=NAMES, sections=SECTIONS, meta=META, schema=st.integers(0, 99)
)
def test_what_is_encoded_is_decoded(
    kind: str, key: str, variant: str, sections: dict[str, bytes], meta: Any, schema: int
) -> None:
    data = encode(kind=kind, key=key, variant=variant, sections=sections, meta=meta, schema=schema)
    header, found = read_all(data)
    assert (header.kind, header.key, header.variant) == (kind, key, variant)
    assert header.schema == schema
    assert equal(header.meta, meta)
    assert list(found.items()) == list(sections.items())


@given(FRAMES)
def test_a_stored_section_is_never_larger_than_its_content(data: bytes) -> None:
    assert all(section.stored_size <= section.raw_size for section in decode(data).header.sections)


@given(FRAMES, st.data())
def test_any_truncation_says_how_much_is_needed(data: bytes, draw: st.DataObject) -> None:
    size = draw.draw(st.integers(0, len(data) - 1))
    steps = [size]
    while steps[-1] < len(data):
        with pytest.raises(TruncatedError) as caught:
            decode(data[: steps[-1]])
        assert steps[-1] < caught.value.needed <= len(data)
        steps.append(caught.value.needed)
    assert len(steps) <= 4  # at most: what was drawn, prelude, header, payload


@given(FRAMES, st.data())
def test_any_damage_is_found(data: bytes, draw: st.DataObject) -> None:
    start = draw.draw(st.integers(0, len(data) - 1))
    patch = draw.draw(st.binary(min_size=1, max_size=8))
    damaged = data[:start] + patch + data[start + len(patch) :]
    assume(damaged != data)
    with pytest.raises(CorruptError):
        read_all(damaged)


@given(FRAMES, st.integers(0, 1 << 20))
def test_the_first_bytes_give_the_same_header_as_the_whole(data: bytes, size: int) -> None:
    try:
        header = decode_header(data[:size])
    except TruncatedError as error:
        size = max(error.needed, PRELUDE_BYTES)
        try:
            header = decode_header(data[:size])
        except TruncatedError as second:
            header = decode_header(data[: second.needed])
    whole = decode(data).header
    assert equal(header.meta, whole.meta)
    assert header.sections == whole.sections


def seal(header: bytes, payload: bytes) -> bytes:
    fields = struct.pack(">8sHHI", MAGIC, 1, 0, len(header))
    return fields + hashlib.sha256(fields + header).digest() + header + payload


def only_corrupt_errors(data: bytes) -> None:
    with contextlib.suppress(CorruptError):
        read_all(data)


@given(st.binary(max_size=200))
@example(MAGIC)
def test_arbitrary_bytes_raise_nothing_but_corrupt_error(data: bytes) -> None:
    only_corrupt_errors(data)
    only_corrupt_errors(MAGIC + data)
    only_corrupt_errors(seal(data, b""))


# Values a header may hold in place of those it should, most of them of the wrong type or size.
WRONG = st.one_of(SCALARS, st.lists(SCALARS, max_size=6), st.dictionaries(st.text(), SCALARS))
RECORDS = st.tuples(
    st.just("s") | WRONG,
    st.sampled_from(["none", "zstd", "lz4"]) | WRONG,
    st.integers(0, 40) | WRONG,
    st.integers(0, 40) | WRONG,
    st.binary(min_size=32, max_size=32) | WRONG,
)


@settings(max_examples=examples(2))
@given(
    changes=st.dictionaries(
        st.sampled_from(["kind", "key", "variant", "schema", "created_ns", "producer", "meta"]),
        WRONG,
        max_size=2,
    ),
    records=st.lists(RECORDS, max_size=3) | WRONG,
    payload=st.binary(max_size=60),
)
def test_forged_headers_raise_nothing_but_corrupt_error(
    changes: dict[str, Any], records: Any, payload: bytes
) -> None:
    header = {"kind": "t", "key": "k", "variant": "", "schema": 0, "created_ns": 1}
    header |= {"producer": "test", "meta": {}, "sections": records}
    only_corrupt_errors(seal(msgpack.packb(header | changes), payload))


@given(st.binary(max_size=300), st.integers(0, 2000))
def test_arbitrary_bytes_as_zstd_raise_nothing_but_corrupt_error(
    stored: bytes, raw_size: int
) -> None:
    """With zstd's own magic, so that they get past its first check."""
    for packed in (stored, b"\x28\xb5\x2f\xfd" + stored):
        record = ["s", "zstd", len(packed), raw_size, hashlib.sha256(packed).digest()]
        header = {"kind": "t", "key": "k", "variant": "", "schema": 0, "created_ns": 1}
        header |= {"producer": "test", "meta": {}, "sections": [record]}
        only_corrupt_errors(seal(msgpack.packb(header), packed))
