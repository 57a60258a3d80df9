"""Frames round-trip, and mistakes of a caller and damaged, forged or large frames are refused."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import pickle
import string
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from s3cache import frame
from s3cache.errors import ConfigError, CorruptError, TruncatedError
from s3cache.frame import PRELUDE_BYTES, Header, decode, decode_head, encode
from tests.support.frames import (
    NOISE,
    TEXT,
    header_fields,
    seal,
    seal_section,
    section_record,
    sha256,
    small_frame,
    zstd_frame,
)
from tests.support.marks import examples
from tests.support.waiting import LONG_S


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


@settings(max_examples=examples(0.5))
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


class TestDamage:
    @pytest.mark.parametrize("signatures", [b"", b"signatures"])
    def test_every_truncation_error_states_the_needed_bytes(self, signatures: bytes) -> None:
        data = frame.signed(decode(small_frame()), lambda _: signatures)
        for size in range(len(data)):
            with pytest.raises(TruncatedError) as caught:
                decode(data[:size])
            assert caught.value.have == size < caught.value.needed <= len(data)

    def test_every_flipped_bit_is_detected(self) -> None:
        data = small_frame()
        for position in range(len(data)):
            for bit in range(8):
                damaged = bytearray(data)
                damaged[position] ^= 1 << bit
                with pytest.raises(CorruptError):
                    decode(damaged)

    @pytest.mark.parametrize(
        ("message", "data"),
        [
            *(
                (f"{len(each)} bytes follow", small_frame() + each)
                for each in (b"\0", small_frame())
            ),
            *(("frame magic", each) for each in (b"<?xml version=", b"\x89S3CF\n\n\n", b"x")),
            ("found 2, this s3cache reads 1 and", seal(header_fields(), version=2)),
            ("signed_size 8193", seal(header_fields(), signed_size=8193)),
            ("signed_size 65535", seal(header_fields(), signed_size=65535)),
            ("header_size", seal(header_fields(), header_size=frame.MAX_HEADER_BYTES + 1)),
        ],
        ids=range(9),
    )
    def test_bytes_that_more_bytes_would_not_help_are_not_a_truncated_frame(
        self, message: str, data: bytes
    ) -> None:
        """A caller reads more bytes after a TruncatedError. No frame is too new or too large."""
        for read in (decode,) if "follow" in message else (decode, decode_head):
            with pytest.raises(CorruptError, match=message) as caught:
                read(data)
            assert not isinstance(caught.value, TruncatedError)


def renamed(old: str, new: str) -> dict[str, Any]:
    return {new if key == old else key: value for key, value in header_fields().items()}


DIGEST = sha256(b"")


WRONG_FIELDS: dict[str, list[Any]] = {
    "kind": ["", b"test", None],
    "key": ["line\nbreak", "\x1b[2J", "k" * 256],
    "variant": [0, None],
    "producer": [""],
    "schema": [-1, 2**32, True, 1.0],
    "created_ns": [2**63, "now"],
    "meta": [None, [], {b"b": 2}],
    "sections": [[section_record(b"")] * 2],
}
WRONG_RECORDS: dict[str, list[Any]] = {
    "name": ["", b"s", "\u202e"],
    "codec": ["lz4", [], "zstd"],
    "digest": [b"short", "x" * 32],
    "stored_size": [-1, 2**63, False],
    "raw_size": [-1, "0", 1],
}
# (part of the message, a header with one error)
FORGED_HEADERS: list[tuple[str, Any]] = [
    *(
        (f"{name}: not", header_fields(**{name: each}))
        for name, v in WRONG_FIELDS.items()
        for each in v
    ),
    *(
        ("section .*: not", header_fields(sections=[section_record(b"", **{name: each})]))
        for name, values in WRONG_RECORDS.items()
        for each in values
    ),
    ("not a map", None),
    ("not a map", []),
    ("not a map", renamed("kind", "type")),
    ("not a map", header_fields(extra=1)),
    ("not a map", dict(sorted(header_fields().items()))),
    ("int is not allowed", header_fields(meta={1: 2})),
    ("meta: not|invalid timestamp", header_fields(meta={"e": msgpack.ExtType(5, b"")})),
    ("exceeds max_ext_len", header_fields(meta={"e": msgpack.ExtType(5, b"abc")})),
    ("sections is no", header_fields(sections=None)),
    ("sections is no", header_fields(sections={})),
    ("array of 5", header_fields(sections=[None])),
    ("array of 5", header_fields(sections=[["s", "none", 0, 0]])),
    ("array of 5", header_fields(sections=[["s", "none", 0, 0, DIGEST, 0]])),
]


GOOD = msgpack.packb(header_fields(meta={"a": 1}))


FORGED_BYTES: list[tuple[str, bytes]] = [
    ("not valid msgpack", b""),
    ("not valid msgpack", GOOD[:-1]),
    ("not valid msgpack", GOOD + b"\0"),
    ("not valid msgpack", b"\xc1"),
    ("not valid msgpack", GOOD.replace(b"\xa4test", b"\xa4\xff\xff\xff\xff")),
    ("not valid msgpack", b"\x91" * 5000 + b"\xc0"),
    ("not valid msgpack", GOOD.replace(b"\x81\xa1a\x01", b"\x81\x90\x01")),
    ("not valid msgpack", GOOD.replace(b"\x81\xa1a\x01", b"\x81\xa1a\xc7\x00\xff")),
    ("canonical", GOOD.replace(b"\x81\xa1a\x01", b"\x82\xa1a\x02\xa1a\x01")),
    ("canonical", GOOD.replace(b"\x81\xa1a\x01", b"\x81\xa1a\xcd\x00\x01")),
    ("canonical", GOOD.replace(b"\xa4test", b"\xd9\x04test")),
]


class TestForgery:
    """The digest is correct, so only the check of the forged field can refuse the frame."""

    def test_the_forging_helpers_make_valid_frames_by_default(self) -> None:
        for data in (seal(GOOD), seal(header_fields()), seal_section(b"abc")):
            decode(data)
        packed = seal_section(zstd_frame(70_000, [(70_000, 65)]), codec="zstd", raw_size=70_000)
        assert decode(packed).section("s") == b"A" * 70_000

    @pytest.mark.parametrize(("message", "header"), FORGED_HEADERS + FORGED_BYTES)
    def test_a_header_with_one_wrong_field_is_refused(self, message: str, header: Any) -> None:
        for read in (decode, decode_head):
            with pytest.raises(CorruptError, match=message):
                read(seal(header))

    @pytest.mark.parametrize(
        ("message", "packed", "raw_size"),
        [
            ("does not decompress", b"not zstd at all", 100),
            ("another size", zstd_frame(101, [(100, 0)]), 100),
            ("another size", zstd_frame(None, [(100, 0)]), 100),
            ("does not decompress", zstd_frame(100, [(99, 0)]), 100),
            ("does not decompress", zstd_frame(100, [(100, 0)]) + b"\0", 100),
            ("does not decompress", zstd_frame(100, [(50, 0)]) * 2, 100),
            ("does not decompress", zstd_frame(100, [(100, 0)])[:-1], 100),
            ("does not decompress", zstd_frame(100, [(100, 0)], dict_id=9), 100),
            ("another size", b"\x50\x2a\x4d\x18\xc8\0\0\0" + bytes(100), 200),
        ],
    )
    def test_a_zstd_frame_must_match_the_header(
        self, message: str, packed: bytes, raw_size: int
    ) -> None:
        found = decode(seal_section(packed, codec="zstd", raw_size=raw_size))
        with pytest.raises(CorruptError, match=message):
            found.section("s")


def nested(depth: int) -> dict[str, Any]:
    meta: dict[str, Any] = {}
    for _ in range(depth - 1):
        meta = {"m": meta}
    return meta


EMPTY = encode(kind="t", key="k", sections={}, meta={"b": bytes(70_000)}, created_ns=1)
ROOM = frame.MAX_HEADER_BYTES - (len(EMPTY) - PRELUDE_BYTES - 70_000)

# (part of the message, arguments of a size, the largest size)
LIMITS: list[tuple[str, Callable[[int], dict[str, Any]], int]] = [
    ("kind", lambda n: {"kind": "n" * n}, 255),
    ("key", lambda n: {"key": "n" * n}, 255),
    ("variant", lambda n: {"variant": "n" * n}, 255),
    ("section", lambda n: {"sections": {"n" * n: b""}}, 255),
    ("4097", lambda n: {"sections": dict.fromkeys(map(hex, range(n)), b"")}, 4096),
    ("4097 exceeds", lambda n: {"meta": {"m": [*map(hex, range(n))]}}, 4096),
    ("4097 exceeds", lambda n: {"meta": {"m": dict.fromkeys(map(hex, range(n)))}}, 4096),
    ("header", lambda n: {"meta": {"b": bytes(n)}}, ROOM),
    ("meta: not", lambda n: {"meta": nested(n)}, 16),
]


class TestLimits:
    """Each limit allows its exact value and refuses the next one, in encode and decode."""

    @pytest.mark.parametrize(("message", "make", "limit"), LIMITS, ids=range(len(LIMITS)))
    def test_limits_of_names_items_and_headers(
        self, message: str, make: Callable[[int], dict[str, Any]], limit: int
    ) -> None:
        most, more = make(limit), make(limit + 1)
        plain: dict[str, Any] = {"kind": "t", "key": "k", "sections": {}, "created_ns": 1}
        found = decode(encode(**plain | most)).header
        assert all(getattr(found, name) == most[name] for name in most if name != "sections")
        with pytest.raises(ConfigError, match=message):
            encode(**plain | more)
        if message != "header" and "sections" not in more:
            with pytest.raises(CorruptError):
                decode(seal(header_fields(**more)))

    def test_limits_of_the_sizes_of_a_frame_and_its_sections(self) -> None:
        def claiming(codec: str, *sizes: tuple[int, int]) -> bytes:
            records = [[str(n), codec, *size, DIGEST] for n, size in enumerate(sizes)]
            return seal(header_fields(sections=records))

        most = (2 << 30) - len(claiming("none", (2 << 30, 2 << 30)))
        assert decode_head(claiming("none", (most, most))).header.sections[0].raw_size == most
        with pytest.raises(CorruptError, match="frame takes 2147483649 bytes"):
            decode_head(claiming("none", (most + 1, most + 1)))
        large = 2 << 20, 1 << 30
        decode_head(claiming("zstd", large, large))
        with pytest.raises(CorruptError, match="sizes: not"):
            decode_head(claiming("zstd", large, (2 << 20, (1 << 30) + 1)))
        most = 1000 * 100 + (64 << 10)
        decode_head(claiming("zstd", (100, most)))
        with pytest.raises(CorruptError, match="section '0'"):
            decode_head(claiming("zstd", (100, most + 1)))

    def test_too_large_sections_are_refused_before_they_are_read(self) -> None:
        size = (2 << 30) + 1
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        with (
            mmap.mmap(-1, size, flags=flags, prot=mmap.PROT_READ) as untouched,
            memoryview(untouched) as view,
            pytest.raises(ConfigError, match=str(size)),
        ):
            encode(kind="t", key="k", sections={"s": view})


BOMBS = {
    "msgpack arrays that claim 4 billion elements": seal(b"\xdd\xff\xff\xff\xff" * 1000),
    "msgpack arrays that claim what the header could hold": seal(
        b"\xdd\x00\x0f\xff\xff" * 1000 + b"\xc0" * ((1 << 20) - 5000)
    ),
    "msgpack arrays nested beyond the stack": seal(b"\x91" * (1 << 20)),
    "a header full of the msgpack that takes most memory as objects": seal(
        b"\xdc\x0f\xa0" + (b"\xdc\x00\x55" + b"\x81\xa0\xc0" * 85) * 4000
    ),
    "metadata nested beyond the stack": seal(
        msgpack.packb(header_fields(meta={"m": 0})).replace(
            b"\xa1m\x00", b"\xa1m" + b"\x91" * 1000 + b"\0"
        )
    ),
    "zstd frame that claims a tebibyte as its header does": seal_section(
        zstd_frame(1 << 40, [(1 << 17, 0)]), codec="zstd", raw_size=1 << 40
    ),
    "zstd frame of a gibibyte that claims 64 KiB": seal_section(
        zstd_frame(1 << 16, [(1 << 17, 0)] * 8192), codec="zstd", raw_size=1 << 16
    ),
}


# The address space is limited to 160 MiB more than is in use, so that a bomb's allocation fails
# with MemoryError in any allocator.
DETONATE = """
import pickle, resource, sys
from s3cache import frame
from s3cache.errors import CorruptError
bombs = pickle.load(sys.stdin.buffer)
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (160 << 20),) * 2)
for data in bombs:
    try:
        found = frame.decode(data)
        found.section(found.names[0])
    except CorruptError:
        print("refused")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_AS is not enforced")
@pytest.mark.parametrize("msgpack_in_python", ["", "1"], ids=["msgpack-in-c", "msgpack-in-python"])
def test_bombs_are_refused_in_bounded_memory(msgpack_in_python: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", DETONATE],
        input=pickle.dumps([*BOMBS.values()]),
        capture_output=True,
        env=os.environ
        | {
            "PYTHONPATH": os.path.dirname(os.path.dirname(frame.__file__)),
            "MSGPACK_PUREPYTHON": msgpack_in_python,
        },
        timeout=LONG_S,
        check=False,
    )
    assert result.stdout.split() == [b"refused"] * len(BOMBS), result.stderr.decode()[-2000:]
