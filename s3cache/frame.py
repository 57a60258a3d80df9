r"""The frame: one cache entry as bytes, a header and named sections, all of it under one digest.

::

    frame    = prelude signatures header payload      nothing follows
    prelude  =  0  magic        8 bytes          89 "S3CF" 0D 0A 0A
                8  version      u16              1
               10  signed_size  u16              bytes of signatures; 0 where there are none
               12  header_size  u32              bytes of header
               16  digest      32 bytes          SHA-256 of prelude[0:16], as if signed_size were 0,
                                                 and header
    signatures = see s3cache.trust; not a part of what they sign
    header   = msgpack map with exactly these keys, in this order:
                kind, key       str              what sort of entry this is, and under which key
                variant         str              tells entries under one key apart; may be ""
                schema          u32              version of what this kind's sections mean
                created_ns      u63              Unix time in nanoseconds
                producer        str              who wrote it, such as "s3cache/0.1.0"
                meta            map              str to nil, bool, int, float, str, bin, array, map
                sections        array of [name str, codec str, stored_size, raw_size, digest bin]
    payload  = the sections' stored bytes, in the header's order, with no gap

Integers in the prelude are big-endian. The magic follows PNG's (RFC 2083, 12.11): the high bit
catches 7-bit channels, CR LF and LF catch newline translation, and no text begins like it.
A section's codec is ``none`` (stored as it is) or ``zstd`` (one zstd frame that states its size, no
dictionary, smaller than what it holds). A section's digest is SHA-256 over its *stored* bytes, so
that nothing unverified is ever decompressed. The header holds every section's digest, so the
prelude's digest stands for the whole frame, and signing it signs everything. The header is
canonical: it must be exactly the bytes that :func:`encode` packs for what it says.

This module decides what is well-formed, not who wrote it: anybody can compute a digest. Pass
``admit`` to check signatures before anything is parsed.
"""

from __future__ import annotations

import hashlib
import re
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, NamedTuple, TypeAlias, cast

import msgpack  # type: ignore[import-untyped]
import zstandard

from s3cache.errors import ConfigError, CorruptError, TruncatedError
from s3cache.util import __version__

__all__ = [
    "HEADER_HINT_BYTES",
    "PRELUDE_BYTES",
    "VERSION",
    "Buffer",
    "Codec",
    "Frame",
    "Head",
    "Header",
    "Judge",
    "Section",
    "decode",
    "decode_head",
    "decode_header",
    "encode",
    "judge",
    "signed",
]

Buffer: TypeAlias = "bytes | bytearray | memoryview"
Codec: TypeAlias = Literal["zstd", "none"]
#: Given a frame's digest and the bytes of its signatures; raises if it may not be used.
Judge: TypeAlias = "Callable[[bytes, bytes], object]"

MAGIC: Final = b"\x89S3CF\r\n\n"
VERSION: Final = 1
PRELUDE_BYTES: Final = 48
#: Size of a first ranged read that holds most headers whole; see :func:`decode_head`.
HEADER_HINT_BYTES: Final = 16 << 10

# Every limit on bytes from elsewhere, each checked before anything of that size is allocated.
MAX_FRAME_BYTES: Final = 2 << 30  # the whole frame, and separately all sections decompressed
MAX_HEADER_BYTES: Final = 1 << 20
MAX_SIGNED_BYTES: Final = 8 << 10
MAX_SECTIONS: Final = 4096
MAX_NAME_BYTES: Final = 255
MAX_META_DEPTH: Final = 16
# Before 1.2.4, msgpack's C unpacker allocates 8 bytes for each element that an array *claims*, at
# each of up to 1,024 nested levels, before it reads one: this many keep that at 32 MiB.
MAX_ITEMS: Final = 4096
# A section may decompress to MAX_RATIO times its stored size and RATIO_SLACK_BYTES more.
MAX_RATIO: Final = 1000
RATIO_SLACK_BYTES: Final = 64 << 10
# RFC 8878, 3.1.1.1.2 recommends that every decoder support this much.
MAX_WINDOW_BYTES: Final = 8 << 20

# Level 3 is zstd's default; higher ones cost the compiling job more CPU than they save in transfer.
ZSTD_LEVEL: Final = 3
# Below this, zstd's own frame header eats what it could save.
MIN_COMPRESS_BYTES: Final = 128

# BLAKE3 is some 3 times faster (benchmarks/digest.py), but that is half a millisecond for a usual
# entry of 1.5 MB. SHA-256 is in the standard library, in FIPS builds, in what signs, and in S3.
_sha256 = hashlib.sha256

_FIELDS: Final = struct.Struct(">8sHHI")  # the prelude but for the digest, which covers these too
_CODECS: Final = ("zstd", "none")
_DIGEST_BYTES: Final = 32
_NAME: Final = re.compile(rf"[ -~]{{1,{MAX_NAME_BYTES}}}")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Section:
    """What the header says of one section: bytes as stored and decompressed, and its digest."""

    name: str
    codec: Codec
    stored_size: int
    raw_size: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Header:
    """All that a frame says of itself; the fields are those of the module's grammar.

    ``meta`` holds None, bool, int (64 bits), float, str, bytes, list and dict with str keys.
    """

    kind: str
    key: str
    variant: str
    schema: int
    created_ns: int
    producer: str
    meta: Mapping[str, Any]
    sections: tuple[Section, ...]


_HEADER_KEYS: Final = tuple(field.name for field in fields(Header))


class Frame:
    """A frame with a verified header, over bytes; a section is verified when first read.

    It keeps ``data`` alive and copies nothing of it: a ``bytearray`` must not change meanwhile. Any
    number of threads may share a frame.

    Attributes:
        header: the decoded header.
        digest: 32 bytes that stand for the whole frame; what a signature covers.
        signatures: their bytes; empty where there are none.
        size: bytes of the frame.
        data: the very object that was given to :func:`decode`.
    """

    __slots__ = (
        "_index", "_verified", "_view", "data", "digest", "header", "signatures", "size",
    )  # fmt: skip

    def __init__(self, data: Buffer, view: memoryview, head: Head) -> None:
        self.data = data
        self.header, self.digest, self.signatures, self.size = head
        self._view = view
        self._index: dict[str, tuple[Section, int]] = {}
        self._verified: set[str] = set()
        start = self.size - sum(section.stored_size for section in self.header.sections)
        for section in self.header.sections:
            self._index[section.name] = section, start
            start += section.stored_size

    def __repr__(self) -> str:
        head = self.header
        return f"<Frame {head.kind} {head.key} {len(self._index)} sections, {self.size} bytes>"

    @property
    def names(self) -> tuple[str, ...]:
        """The sections' names, in the frame's order."""
        return tuple(self._index)

    def verify(self) -> None:
        """Check every section against its digest, once; nothing is decompressed or copied.

        Raises:
            CorruptError: a section's bytes do not match.
        """
        for name in self._index:
            self._stored(name)

    def section(self, name: str) -> Buffer:
        """Return the bytes of one section, verified; no other section is looked at.

        An uncompressed section comes as a read-only view into :attr:`data`; a compressed one is
        decompressed again by each call.

        Raises:
            KeyError: the frame has no such section.
            CorruptError: the bytes do not match their digest, or do not decompress to what the
                header says.
        """
        if name not in self._index:
            raise KeyError(f"no section {name!r} in this {self.header.kind!r} frame")
        stored = self._stored(name)
        section = self._index[name][0]
        return stored if section.codec == "none" else _decompress(section, stored)

    def _stored(self, name: str) -> memoryview:
        section, start = self._index[name]
        stored = self._view[start : start + section.stored_size]
        if name not in self._verified:
            if _sha256(stored).digest() != section.digest:
                raise CorruptError(f"section {name!r}", "its bytes do not match their digest")
            self._verified.add(name)
        return stored


def encode(
    *,
    kind: str,
    key: str,
    sections: Mapping[str, Buffer],
    variant: str = "",
    schema: int = 0,
    meta: Mapping[str, Any] | None = None,
    codec: Codec = "zstd",
    created_ns: int | None = None,
) -> bytes:
    """Pack ``sections`` into a frame, in their order.

    ``codec`` is what to try: a section that would not shrink, or that would shrink beyond what
    :func:`decode` accepts, is stored as it is. Equal arguments, ``created_ns`` included, give equal
    bytes (with one version of zstd). A section is copied once at most.

    Raises:
        ConfigError: an argument that no frame can hold.
    """
    if codec not in _CODECS:
        raise ConfigError(f"codec {codec!r}", "is unknown", "use 'zstd' or 'none'")
    header = Header(
        kind=kind,
        key=key,
        variant=variant,
        schema=schema,
        created_ns=time.time_ns() if created_ns is None else created_ns,
        producer=f"s3cache/{__version__}",
        meta=dict(meta or {}),
        sections=(),
    )
    _check_fields(header)
    _check_total("sections", len(sections), MAX_SECTIONS, "are {}")
    views: dict[str, memoryview] = {}
    for name, data in sections.items():
        _check_name("section name", name)
        views[name] = _bytes_view(f"section {name!r}", data)
    _check_total("sections", sum(map(len, views.values())))

    compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
    rows: list[tuple[str, str, int, int, bytes]] = []
    payload: list[Buffer] = []
    for name, raw in views.items():
        stored: Buffer = raw
        used: Codec = "none"
        if codec == "zstd" and len(raw) >= MIN_COMPRESS_BYTES:
            packed = compressor.compress(raw)
            if len(packed) < len(raw) <= _max_raw(len(packed)):
                stored, used = packed, "zstd"
        rows.append((name, used, len(stored), len(raw), _sha256(stored).digest()))
        payload.append(stored)

    packed_header = _pack(header, rows)
    _check_total("header", len(packed_header), MAX_HEADER_BYTES)
    digest = _sha256(_FIELDS.pack(MAGIC, VERSION, 0, len(packed_header)) + packed_header).digest()
    return _join(b"", digest, packed_header, payload)


def _join(signatures: bytes, digest: bytes, header: Buffer, payload: list[Buffer]) -> bytes:
    fields = _FIELDS.pack(MAGIC, VERSION, len(signatures), len(header))
    chunks = [fields, digest, signatures, header, *payload]
    _check_total("frame", sum(map(len, chunks)))
    return b"".join(chunks)


def signed(entry: Frame, sign: Callable[[bytes], bytes]) -> bytes:
    """Return ``entry`` with other signatures; its digest, header and sections stay the same.

    Args:
        sign: returns the bytes of the signatures over the digest, empty for none.

    Raises:
        ConfigError: they are too many.
    """
    signatures = sign(entry.digest)
    _check_total("signatures", len(signatures), MAX_SIGNED_BYTES, "take {} bytes")
    prelude = _read_prelude(entry._view)
    payload: list[Buffer] = [entry._view[prelude.end :]]
    return _join(signatures, entry.digest, entry._view[prelude.start : prelude.end], payload)


class Head(NamedTuple):
    """What the first bytes of a frame say: its header, what stands for all of it, and its size."""

    header: Header
    digest: bytes
    signatures: bytes
    size: int


def decode(data: Buffer, *, admit: Judge | None = None) -> Frame:
    """Read a whole frame: every size and the header's digest are checked, no section is touched.

    Args:
        admit: raises if a frame with that digest and those signatures may not be used; it is called
            before the header is parsed.

    Raises:
        TruncatedError: the bytes end too early.
        CorruptError: they are not one well-formed frame of this version.
        ConfigError: ``data`` is no contiguous buffer.
        Exception: what ``admit`` raises.
    """
    view = _bytes_view("frame", data)
    head = _read_head(view, admit)
    if len(view) < head.size:
        raise TruncatedError("frame payload", len(view), head.size)
    if len(view) > head.size:
        raise CorruptError("frame end", f"{len(view) - head.size} bytes follow the last section")
    return Frame(data, view, head)


def decode_head(first_bytes: Buffer, *, admit: Judge | None = None) -> Head:
    """Read the head from the first bytes of a frame, as they come from a ranged read.

    Raises:
        TruncatedError: read at least ``needed`` bytes and call again; two reads are enough from
            48 bytes on, and :data:`HEADER_HINT_BYTES` mostly make it one.
        CorruptError: this is no well-formed header of this version.
        ConfigError: ``first_bytes`` is no contiguous buffer.
        Exception: what ``admit`` raises.
    """
    return _read_head(_bytes_view("frame", first_bytes), admit)


def decode_header(first_bytes: Buffer, *, admit: Judge | None = None) -> Header:
    """Return the header in what :func:`decode_head` reads, which raises the same."""
    return decode_head(first_bytes, admit=admit).header


def judge(first_bytes: Buffer, admit: Judge) -> None:
    """Have ``admit`` decide whether a frame may be used; nothing of its header is parsed.

    Raises:
        As :func:`decode_head` does.
    """
    prelude = _read_prelude(_bytes_view("frame", first_bytes))
    admit(prelude.digest, prelude.signatures)


class _Prelude(NamedTuple):
    """What comes before the header, which lies from ``start`` to ``end`` and is verified."""

    digest: bytes
    signatures: bytes
    start: int
    end: int


def _read_prelude(view: memoryview) -> _Prelude:
    # The magic first: what is no frame at all should not ask for more bytes.
    if view[: len(MAGIC)] != MAGIC[: len(view)]:
        raise CorruptError("frame magic", f"{bytes(view[: len(MAGIC)])!r} is not that of a frame")
    if len(view) < PRELUDE_BYTES:
        raise TruncatedError("frame prelude", len(view), PRELUDE_BYTES)
    _, version, signed_size, header_size = _FIELDS.unpack_from(view)
    if version != VERSION:
        raise CorruptError(
            "frame version", f"found {version}, this s3cache reads {VERSION} and nothing else"
        )
    if signed_size > MAX_SIGNED_BYTES:
        raise CorruptError("frame prelude", f"{signed_size} bytes of signatures are out of bounds")
    if header_size > MAX_HEADER_BYTES:
        raise CorruptError(
            "frame prelude", f"header_size is {header_size}, more than {MAX_HEADER_BYTES}"
        )
    start = PRELUDE_BYTES + signed_size
    end = start + header_size
    if len(view) < end:
        raise TruncatedError("frame header", len(view), end)
    digest = bytes(view[_FIELDS.size : PRELUDE_BYTES])
    hasher = _sha256(_FIELDS.pack(MAGIC, version, 0, header_size))
    hasher.update(view[start:end])
    if hasher.digest() != digest:
        raise CorruptError("frame header", "its bytes do not match their digest")
    return _Prelude(digest, bytes(view[PRELUDE_BYTES:start]), start, end)


def _read_head(view: memoryview, admit: Judge | None) -> Head:
    prelude = _read_prelude(view)
    if admit is not None:
        admit(prelude.digest, prelude.signatures)
    try:
        header = _parse_header(view[prelude.start : prelude.end])
        size = prelude.end + sum(section.stored_size for section in header.sections)
        _check_total("frame", size)
    except ConfigError as error:  # what encode() would not accept either
        raise CorruptError("frame header", f"{error.thing} {error.cause}") from None
    return Head(header, prelude.digest, prelude.signatures, size)


def _parse_header(packed: memoryview) -> Header:
    try:
        parsed = msgpack.unpackb(
            packed,
            raw=False,
            strict_map_key=True,
            max_str_len=MAX_HEADER_BYTES,
            max_bin_len=MAX_HEADER_BYTES,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
            max_ext_len=0,  # lets empty ones pass: _meta_fault refuses those
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise CorruptError(
            "frame header", f"not valid msgpack ({type(error).__name__}: {error})"
        ) from None
    if type(parsed) is not dict or tuple(parsed) != _HEADER_KEYS:
        raise CorruptError("frame header", f"not a map with the keys {', '.join(_HEADER_KEYS)}")
    rows = parsed["sections"]
    if type(rows) is not list:
        raise CorruptError("frame header", "sections is no array")
    _check_total("sections", len(rows), MAX_SECTIONS, "are {}")
    header = Header(**(parsed | {"sections": tuple(map(_parse_section, rows))}))
    _check_fields(header)
    _check_total("sections", sum(section.raw_size for section in header.sections))
    if len({section.name for section in header.sections}) != len(rows):
        raise CorruptError("frame header", "two sections have one name")
    # Two readings of one header must not differ: this refuses duplicate keys and padded integers.
    if _pack(header, rows) != packed:
        raise CorruptError("frame header", "not in canonical form")
    return header


def _parse_section(row: object) -> Section:
    if type(row) is not list or len(row) != 5:
        raise CorruptError("frame header", "a section is no array of 5")
    name, codec, stored_size, raw_size, digest = row
    _check_name("section name", name)
    where = f"section {name!r}"
    if type(codec) is not str or codec not in _CODECS:
        raise CorruptError(where, f"codec {_brief(codec)} is unknown")
    _check_integer(f"{where} stored_size", stored_size, 63)
    _check_integer(f"{where} raw_size", raw_size, 63)
    if type(digest) is not bytes or len(digest) != _DIGEST_BYTES:
        raise CorruptError(where, f"its digest is not {_DIGEST_BYTES} bytes")
    if codec == "none" and raw_size != stored_size:
        raise CorruptError(where, f"stores {stored_size} bytes as they are, but claims {raw_size}")
    if codec == "zstd" and not stored_size < raw_size <= _max_raw(stored_size):
        raise CorruptError(
            where, f"claims that {stored_size} bytes decompress to {raw_size}, out of bounds"
        )
    return Section(name, cast("Codec", codec), stored_size, raw_size, digest)


def _decompress(section: Section, stored: memoryview) -> bytes:
    where = f"section {section.name!r}"
    try:
        # decompress() allocates whatever the zstd frame claims and then ignores max_output_size:
        # the claim must be the header's, which is within limits.
        claimed = zstandard.get_frame_parameters(stored)
        if claimed.content_size != section.raw_size:
            raise CorruptError(where, "its zstd frame states another size than the header")
        if claimed.dict_id != 0 or claimed.window_size > MAX_WINDOW_BYTES:
            raise CorruptError(where, "its zstd frame wants a dictionary or too large a window")
        # Not thread-safe, so a new one each time: that costs 8 µs.
        return zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptError(where, f"does not decompress ({error})") from None


def _pack(header: Header, rows: list[Any]) -> bytes:
    content = {name: getattr(header, name) for name in _HEADER_KEYS} | {"sections": rows}
    return cast("bytes", msgpack.packb(content, use_bin_type=True))


def _max_raw(stored_size: int) -> int:
    return MAX_RATIO * stored_size + RATIO_SLACK_BYTES


def _bytes_view(thing: str, data: Buffer) -> memoryview:
    """Return ``data`` as a flat read-only view of its bytes."""
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise ConfigError(
            thing, f"is {type(data).__name__}", "give bytes, a bytearray or a memoryview"
        )
    view = memoryview(data)
    if not view.c_contiguous:
        raise ConfigError(thing, "is not contiguous", "copy it with bytes() first")
    # cast() refuses views with a zero in their shape.
    return (view.cast("B") if view.nbytes else memoryview(b"")).toreadonly()


def _check_fields(header: Header) -> None:
    _check_name("kind", header.kind)
    _check_name("key", header.key)
    if header.variant != "":
        _check_name("variant", header.variant)
    _check_name("producer", header.producer)
    _check_integer("schema", header.schema, 32)
    _check_integer("created_ns", header.created_ns, 63)
    if type(header.meta) is not dict:
        raise ConfigError("meta", f"is {type(header.meta).__name__}", "give a dict")
    fault = _meta_fault(header.meta, 0)
    if fault is not None:
        path, cause = fault
        raise ConfigError(
            f"meta{path}",
            cause,
            "use None, bool, int, float, str, bytes, list and dict; put the rest into a section",
        )


def _check_name(thing: str, name: object) -> None:
    # ASCII, because what Unicode calls printable differs between Python's versions, and because
    # no two names may look the same.
    if type(name) is not str or not _NAME.fullmatch(name):
        raise ConfigError(
            f"{thing} {_brief(name)}",
            "is no usable name",
            f"use 1 to {MAX_NAME_BYTES} printable ASCII characters",
        )


def _check_integer(thing: str, value: object, bits: int) -> None:
    if type(value) is not int or not 0 <= value < 1 << bits:
        raise ConfigError(
            f"{thing} {_brief(value)}", "is out of range", f"use an int from 0 to 2**{bits} - 1"
        )


def _check_total(
    thing: str, total: int, most: int = MAX_FRAME_BYTES, cause: str = "takes {} bytes"
) -> None:
    if total > most:
        raise ConfigError(
            thing,
            f"{cause.format(total)}, more than {most}",
            "use less metadata and smaller sections, or several entries",
        )


def _meta_fault(value: object, depth: int) -> tuple[str, str] | None:
    """Return where in ``value`` something is that a header cannot hold, and what it is.

    Types are compared exactly: msgpack would turn a subclass into its base without a word.
    """
    if value is None or type(value) in (bool, float, bytes):
        return None
    if type(value) is int:
        return None if -(1 << 63) <= value < 1 << 64 else ("", "does not fit into 64 bits")
    if type(value) is str:
        return ("", "holds a lone surrogate") if _SURROGATE.search(value) else None
    items: Any
    if type(value) is dict:
        items = value.items()
    elif type(value) is list:
        items = enumerate(value)
    else:
        return "", f"is of type {type(value).__name__}"
    if depth == MAX_META_DEPTH:
        return "", f"is nested more than {MAX_META_DEPTH} deep"
    if len(value) > MAX_ITEMS:
        return "", f"has {len(value)} items, more than {MAX_ITEMS}"
    for key, item in items:
        if type(value) is dict and (type(key) is not str or _SURROGATE.search(key)):
            return "", f"has {_brief(key)} as a key"
        fault = _meta_fault(item, depth + 1)
        if fault is not None:
            return f"[{_brief(key)}]{fault[0]}", fault[1]
    return None


def _brief(value: object) -> str:
    """Return a repr short enough for a message, whatever was forged."""
    if type(value) is int and value.bit_length() > 64:  # repr() refuses ints beyond 4,300 digits
        return "a very large int"
    text = repr(value) if type(value) in (str, bytes, int, bool, float) else type(value).__name__
    return text if len(text) <= 80 else f"{text[:77]}..."
