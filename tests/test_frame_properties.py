"""Frames with arbitrary input round-trip, or raise only CorruptError."""

from __future__ import annotations

import contextlib
import string
import struct
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from s3cache.errors import CorruptError
from s3cache.frame import Header, decode, encode
from tests.support.frames import header_fields, seal
from tests.support.marks import examples

NAMES = st.text(alphabet=[*string.printable[:95]], min_size=1, max_size=255)
# Repetitions and noise: some sections compress well, some do not, and some would compress too well.
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


def equal(one: Any, other: Any) -> bool:
    """Compare values and types, the order of dicts, and all bits of floats (NaN, -0.0)."""
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
    return found.header, {name: bytes(found.section(name)) for name in found.names}


@given(
    kind=NAMES, key=NAMES, variant=NAMES, sections=SECTIONS, meta=META, schema=st.integers(0, 99)
)
def test_encoded_frames_are_decoded_to_equal_values(
    kind: str, key: str, variant: str, sections: dict[str, bytes], meta: Any, schema: int
) -> None:
    data = encode(kind=kind, key=key, variant=variant, sections=sections, meta=meta, schema=schema)
    header, found = read_all(data)
    assert (header.kind, header.key, header.variant) == (kind, key, variant)
    assert header.schema == schema
    assert equal(header.meta, meta)
    assert list(found.items()) == list(sections.items())


# Values for the fields of a forged header. Most of them have the wrong type or size.
WRONG = st.one_of(SCALARS, st.lists(SCALARS, max_size=6), st.dictionaries(st.text(), SCALARS))
SECTION_ROWS = st.tuples(
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
    sections=st.lists(SECTION_ROWS, max_size=3) | WRONG,
    payload=st.binary(max_size=60),
)
def test_forged_headers_raise_only_corrupt_error(
    changes: dict[str, Any], sections: Any, payload: bytes
) -> None:
    with contextlib.suppress(CorruptError):
        read_all(seal(header_fields(sections=sections, **changes), payload))
