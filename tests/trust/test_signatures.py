"""Signatures as bytes: what is packed is read back, and nothing else is."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from s3cache.errors import ConfigError, CorruptError
from s3cache.trust import MAX_SIGNATURES, Algorithm, Signature, Statement, pack, unpack

names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._/@+-]{0,127}", fullmatch=True)
seconds = st.integers(0, 2**64 - 1)


@st.composite
def signatures(draw: st.DrawFn) -> Signature:
    algorithm = draw(st.sampled_from(Algorithm))
    statement = Statement(algorithm, draw(names), draw(names), draw(seconds), draw(seconds))
    return Signature(statement, draw(st.binary(min_size=algorithm.size, max_size=algorithm.size)))


@given(st.lists(signatures(), max_size=MAX_SIGNATURES))
def test_what_is_packed_is_read_back(found: list[Signature]) -> None:
    assert unpack(pack(found)) == found


@given(st.binary(max_size=200))
def test_whatever_is_read_is_packed_to_the_same_bytes(data: bytes) -> None:
    """Two blocks never say the same: nothing can be put where nobody looks."""
    try:
        found = unpack(data)
    except CorruptError:
        return
    assert pack(found) == data


def test_the_layout_is_the_documented_one() -> None:
    statement = Statement(Algorithm.ED25519, "ci", "main", 7, 9)
    packed = struct.pack(">BBBBQQ", 1, 2, 4, 64, 7, 9) + b"cimain"
    assert pack([Signature(statement, b"v" * 64)]) == packed + b"v" * 64
    digest = b"d" * 32
    assert statement.over(digest) == b"s3cache entry signature 1\x00" + digest + packed


def test_there_is_a_bound() -> None:
    one = Signature(Statement(Algorithm.HMAC_SHA256, "a", "b", 0), bytes(32))
    block = pack([one] * MAX_SIGNATURES)
    assert len(unpack(block)) == MAX_SIGNATURES
    with pytest.raises(CorruptError, match="more than 16"):
        unpack(block + pack([one]))
    with pytest.raises(ConfigError, match="sign with fewer keys"):
        pack([one] * (MAX_SIGNATURES + 1))


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ((3, 1, 1, 64), b"ab"),  # no such algorithm
        ((0, 1, 1, 64), b"ab"),
        ((1, 1, 1, 32), b"ab"),  # the size of another algorithm's
        ((2, 1, 1, 64), b"ab"),
        ((1, 0, 1, 64), b"b"),  # nobody
        ((1, 1, 0, 64), b"a"),
        ((1, 1, 1, 64), b"a\xff"),
        ((1, 1, 1, 64), b"\nb"),
    ],
)
def test_what_is_no_statement_is_refused(fields: tuple[int, ...], names: bytes) -> None:
    block = struct.pack(">BBBBQQ", *fields, 0, 0) + names + bytes(fields[3])
    with pytest.raises(CorruptError, match="signatures"):
        unpack(block)
