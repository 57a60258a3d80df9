"""Frames round-trip, and mistakes of a caller are refused."""

from __future__ import annotations

import ctypes
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest
import zstandard

from s3cache import frame
from s3cache.errors import ConfigError, CorruptError, TruncatedError
from s3cache.frame import PRELUDE_BYTES, decode, decode_head, encode
from tests.support.frames import NOISE, TEXT, seal, sha256, small_frame


class TestRoundTrip:
    @pytest.mark.parametrize("signatures", [b"", b"signatures"])
    def test_the_layout_is_the_documented_one(self, signatures: bytes) -> None:
        """The test parses a frame by hand, so that frames written today stay readable."""
        data = frame.signed(decode(small_frame()), lambda _: signatures)
        magic, version, signed_size, size, digest = struct.unpack_from(">8sHHI32s", data)
        assert (magic, version, signed_size) == (b"\x89S3CF\r\n\n", 1, len(signatures))
        start = 48 + signed_size
        assert data[48:start] == signatures
        packed = data[start : start + size]
        assert digest == sha256(data[:10] + b"\0\0" + data[12:16] + packed) == decode(data).digest
        header = msgpack.unpackb(packed)
        assert list(header) == [
            *("kind", "key", "variant", "schema", "created_ns", "producer", "meta", "sections")
        ]
        at = start + size
        for name, codec, stored_size, raw_size, section_digest in header["sections"]:
            stored = data[at : at + stored_size]
            at += stored_size
            assert section_digest == sha256(stored)
            raw = zstandard.decompress(stored) if codec == "zstd" else stored
            assert raw == {"text": TEXT, "noise": NOISE, "empty": b""}[name]
            assert raw_size == len(raw)
        assert at == len(data)

    def test_any_buffer_is_read_and_written_as_bytes(self) -> None:
        for kind in (bytes, bytearray, memoryview):
            data = encode(kind="t", key="k", sections={"s": kind(TEXT)})
            assert decode(kind(data)).section("s") == TEXT
        words = memoryview(bytearray(800)).cast("Q")
        none = memoryview((ctypes.c_char * 3 * 0)())
        found = decode(encode(kind="t", key="k", sections={"s": words, "none": none}, codec="none"))
        assert (found.section("s"), found.section("none")) == (bytes(800), b"")

    def test_admit_is_called_before_anything_is_parsed(self) -> None:
        asked: list[tuple[bytes, bytes]] = []
        data = frame.signed(decode(small_frame()), lambda _: b"signatures")
        found = decode(data, admit=lambda *what: asked.append(what))
        assert asked == [(found.digest, b"signatures")]

        def refuse(*_: object) -> None:
            raise KeyError

        no_header = seal(b"\xc1")
        for read in (decode, decode_head):
            with pytest.raises(KeyError):
                read(no_header, admit=refuse)
            with pytest.raises(CorruptError, match="not valid msgpack"):
                read(no_header)


def test_sections_that_shrink_too_little_or_too_much_are_stored_uncompressed() -> None:
    """A compressed megabyte of zeros would look like a decompression bomb."""
    zeros = bytes(1 << 20)
    found = decode(encode(kind="t", key="k", sections={"t": TEXT, "n": NOISE, "z": zeros}))
    assert [section.codec for section in found.header.sections] == ["zstd", "none", "none"]
    assert [found.section(name) for name in found.names] == [TEXT, NOISE, zeros]


def test_two_reads_of_any_size_are_enough_for_a_header() -> None:
    data = small_frame()
    for size in range(PRELUDE_BYTES):
        with pytest.raises(TruncatedError) as caught:
            decode_head(data[:size])
        assert caught.value.needed == PRELUDE_BYTES
    for size in range(PRELUDE_BYTES, len(data)):
        try:
            header = decode_head(data[:size]).header
        except TruncatedError as error:
            header = decode_head(data[: error.needed]).header
        assert header == decode(data).header


def test_an_absent_section_raises_a_key_error_with_its_name() -> None:
    with pytest.raises(KeyError, match="no section 'absent' in this 'test' frame"):
        decode(small_frame()).section("absent")


def test_an_uncompressed_section_is_a_read_only_view_of_the_input() -> None:
    data = bytearray(encode(kind="t", key="k", sections={"s": NOISE}))
    found = decode(data)
    view = found.section("s")
    assert found.data is data
    assert isinstance(view, memoryview)
    assert (view.obj is data, view.readonly, view) == (True, True, NOISE)


def test_encode_copies_the_payload_once_and_decode_copies_no_data() -> None:
    def peak_of(call: Callable[[], object]) -> int:
        tracemalloc.start()
        try:
            call()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    size = 8 << 20
    plain: dict[str, Any] = {"kind": "t", "key": "k", "codec": "none"}
    sections = {"a": bytes(size), "b": bytes(size)}
    assert peak_of(lambda: encode(**plain, sections=sections)) < 2.1 * size
    data = encode(**plain, sections=sections)
    assert peak_of(lambda: decode(data).section("a")) < size / 16


LOOP: list[Any] = []
LOOP.append(LOOP)


class TestMistakes:
    """A mistake of a caller raises a ConfigError that names the wrong value."""

    @pytest.mark.parametrize(
        ("thing", "changes"),
        [
            ("kind", {"kind": ""}),
            ("key", {"key": b"k"}),
            ("key", {"key": "a\n"}),
            ("variant", {"variant": None}),
            ("schema", {"schema": -1}),
            ("out of range", {"schema": 10**5000}),
            ("created_ns", {"created_ns": 1.5}),
            ("codec", {"codec": "gzip"}),
            ("section ''", {"sections": {"": b""}}),
            ("section 1", {"sections": {1: b""}}),
            ("section 's'", {"sections": {"s": "text"}}),
            ("section 's'", {"sections": {"s": memoryview(b"abcd")[::2]}}),
            ("'tuple'", {"meta": {"a": (1, 2)}}),
            ("'set'", {"meta": {"a": [0, {"b": {1}}]}}),
            ("out of range", {"meta": {"a": 2**64}}),
            ("surrogates", {"meta": {"a": "\ud800"}}),
            ("map key", {"meta": {1: "a"}}),
            ("meta", {"meta": {b"a": 1}}),
            ("recursion", {"meta": {"loop": LOOP}}),
        ],
    )
    def test_a_wrong_argument_raises_an_error_with_its_name(
        self, thing: str, changes: dict[str, Any]
    ) -> None:
        with pytest.raises(ConfigError, match=thing):
            encode(**{"kind": "t", "key": "k", "sections": {}} | changes)

    @pytest.mark.parametrize("data", ["text", None, memoryview(small_frame() * 2)[::2]])
    def test_only_contiguous_buffers_are_read(self, data: Any) -> None:
        for read in (decode, decode_head):
            with pytest.raises(ConfigError, match="frame"):
                read(data)
