"""Small frames: valid ones, and hand-made ones with any content."""

from __future__ import annotations

import hashlib
import random
import struct
from typing import Any

import msgpack  # type: ignore[import-untyped]

from s3cache import frame
from s3cache.frame import encode

TEXT = b"the same words over and over; " * 40


NOISE = random.Random(1).randbytes(200)


def small_frame() -> bytes:
    """A frame with a compressed, an uncompressed and an empty section, and some metadata."""
    return encode(
        kind="test",
        key="k1",
        variant="v",
        schema=7,
        sections={"text": TEXT, "noise": NOISE, "empty": b""},
        meta={"torch": "2.13", "deep": {"list": [1, -2, None, True, 0.5, b"\xff", "ü"]}},
        created_ns=1_700_000_000_000_000_000,
    )


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def section_record(
    stored: bytes, *, name: Any = "s", codec: Any = "none", raw_size: Any = None, **other: Any
) -> list[Any]:
    size = other.get("stored_size", len(stored))
    raw_size = len(stored) if raw_size is None else raw_size
    return [name, codec, size, raw_size, other.get("digest", sha256(stored))]


def header_fields(**changes: Any) -> dict[str, Any]:
    return {
        "kind": "test",
        "key": "k",
        "variant": "",
        "schema": 0,
        "created_ns": 1,
        "producer": "test/1",
        "meta": {},
        "sections": [],
    } | changes


def seal(header: Any, payload: bytes = b"", **prelude: Any) -> bytes:
    """Return a frame with any header, an object or bytes, and the right digest."""
    packed = header if isinstance(header, bytes) else msgpack.packb(header, strict_types=False)
    fields = struct.pack(
        ">8sHHI",
        prelude.get("magic", frame.MAGIC),
        prelude.get("version", frame.VERSION),
        prelude.get("signed_size", 0),
        prelude.get("header_size", len(packed)),
    )
    return fields + sha256(fields + packed) + packed + payload


def seal_section(stored: bytes, **record: Any) -> bytes:
    """Return a frame with one section ``s``, and a record of it that may be false."""
    return seal(header_fields(sections=[section_record(stored, **record)]), stored)


def zstd_frame(
    content_size: int | None, blocks: list[tuple[int, int]], *, dict_id: int = 0
) -> bytes:
    """A hand-made zstd frame (RFC 8878, 3.1.1) of runs: (length, byte) each, at most 128 KiB."""
    descriptor = (0 if content_size is None else 0xC0) | (1 if dict_id else 0)
    out = struct.pack("<IBB", 0xFD2FB528, descriptor, (17 - 10) << 3)
    out += bytes([dict_id]) if dict_id else b""
    out += b"" if content_size is None else struct.pack("<Q", content_size)
    for position, (length, byte) in enumerate(blocks):
        last = position == len(blocks) - 1
        out += struct.pack("<I", length << 3 | 1 << 1 | last)[:3] + bytes([byte])
    return out
