r"""The frame: a cache entry as bytes. One digest covers its header and named sections.

::

    frame    = prelude signatures header payload      nothing follows
    prelude  =  0  magic        8 bytes          89 "S3CF" 0D 0A 0A
                8  version      u16              1
               10  signed_size  u16              bytes of signatures; 0 if there are none
               12  header_size  u32              bytes of header
               16  digest      32 bytes          SHA-256 of prelude[0:16], as if signed_size were 0,
                                                 and header
    signatures = see s3cache.trust; they do not sign themselves
    header   = msgpack map with exactly these keys, in this order:
                kind, key       str              the kind of entry, and its key
                variant         str              tells entries under one key apart; may be ""
                schema          u32              version of the sections of this kind
                created_ns      u63              Unix time in nanoseconds
                producer        str              the writer, such as "s3cache/0.1.0"
                meta            map              str to nil, bool, int, float, str, bin, array, map
                sections        array of [name str, codec str, stored_size, raw_size, digest bin]
    payload  = the sections' stored bytes, in the header's order, with no gap

Integers in the prelude are big-endian. The magic follows PNG's (RFC 2083, 12.11): the high bit
catches 7-bit channels, CR LF and LF catch newline translation, and no text begins like this. A
section's codec is ``none`` (stored unchanged) or ``zstd`` (one zstd frame that states its size, no
dictionary, smaller than its content). A section's digest is SHA-256 over its *stored* bytes, so
that nothing unverified is ever decompressed. The header has every section's digest, so the
prelude's digest identifies the whole frame, and signing it signs everything. The header is
canonical: it must be exactly the bytes that :func:`encode` packs for its content.

This module checks that frames are well-formed, not who wrote them: anyone can compute a digest.
Pass ``admit`` to check signatures before anything is parsed.
"""

from __future__ import annotations

import hashlib
import re
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, NamedTuple, TypeAlias, cast, get_args

import msgpack  # type: ignore[import-untyped]
import zstandard

from s3cache.errors import ConfigError, CorruptError, TruncatedError
from s3cache.util import __version__

Buffer: TypeAlias = "bytes | bytearray | memoryview"
Codec: TypeAlias = Literal["zstd", "none"]
#: Called with a frame's digest and the bytes of its signatures; raises if it may not be used.
TrustCheck: TypeAlias = "Callable[[bytes, bytes], object]"

MAGIC: Final = b"\x89S3CF\r\n\n"
VERSION: Final = 1
PRELUDE_BYTES: Final = 48
#: Size of a first ranged read that covers most headers; see :func:`decode_head`.
HEADER_HINT_BYTES: Final = 16 << 10

# Limits on foreign bytes. They are checked before memory of that size is allocated.
MAX_FRAME_BYTES: Final = 2 << 30  # the whole frame, and separately all sections decompressed
MAX_HEADER_BYTES: Final = 1 << 20
MAX_SIGNED_BYTES: Final = 8 << 10
MAX_NAME_BYTES: Final = 255
MAX_META_DEPTH: Final = 16
# Of one array or map, the sections too. Before 1.2.4, msgpack allocates 8 bytes for each element
# that an array *announces*, at each of up to 1,024 nested levels: this limit keeps that at 32 MiB.
MAX_ITEMS: Final = 4096
# A section may decompress to MAX_RATIO times its stored size and RATIO_SLACK_BYTES more.
MAX_RATIO: Final = 1000
RATIO_SLACK_BYTES: Final = 64 << 10

ZSTD_LEVEL: Final = 3  # higher levels cost the compiling job more CPU than they save in transfer

# BLAKE3 is some 3 times faster, but that is half a millisecond for a usual
# entry of 1.5 MB. SHA-256 is in the standard library, in FIPS builds, in signatures, and in S3.
_sha256 = hashlib.sha256

_FIELDS: Final = struct.Struct(">8sHHI")  # the prelude without the digest, which covers these too
# ASCII, because Unicode's printable characters differ between versions of Python, and because no
# two names may look the same.
_NAME: Final = re.compile(rf"[ -~]{{1,{MAX_NAME_BYTES}}}")


class Section(NamedTuple):
    """A section in the header: its stored and decompressed size, and its digest."""

    name: str
    codec: Codec
    stored_size: int
    raw_size: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a frame; the fields are those of the module's grammar.

    ``meta`` contains None, bool, int (64 bits), float, str, bytes, list and dict with str keys.
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


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """The decoded first bytes of a frame.

    Attributes:
        header: the decoded header.
        digest: 32 bytes that identify the whole frame; a signature covers it.
        signatures: their bytes; empty if there are none.
        size: the size of the frame in bytes.
    """

    header: Header
    digest: bytes
    signatures: bytes
    size: int


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Frame(Head):
    """A verified frame over bytes that are not copied: do not change a ``bytearray`` meanwhile.

    Any number of threads may share a frame.

    Attributes:
        data: the object that was passed to :func:`decode`.
    """

    data: Buffer
    _view: memoryview

    @property
    def names(self) -> tuple[str, ...]:
        """The sections' names, in the frame's order."""
        return tuple(section.name for section in self.header.sections)

    def section(self, name: str) -> Buffer:
        """Return the bytes of one section.

        An uncompressed section is a read-only view into :attr:`data`; a compressed one is
        decompressed by every call. Raises KeyError if the frame has no section of this name, and
        CorruptError if the bytes do not decompress to the size in the header.
        """
        for section, stored in self._stored():
            if section.name == name:
                return stored if section.codec == "none" else _decompress(section, stored)
        raise KeyError(f"no section {name!r} in this {self.header.kind!r} frame")

    def _stored(self) -> Iterator[tuple[Section, memoryview]]:
        start = _payload_start(self)
        for section in self.header.sections:
            yield section, self._view[start : (start := start + section.stored_size)]


def _payload_start(head: Head) -> int:
    return head.size - sum(section.stored_size for section in head.header.sections)


# -- writing


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

    ``codec`` is tried: a section that does not shrink, or that shrinks more than :func:`decode`
    accepts, is stored unchanged. Equal arguments, including ``created_ns``, give equal bytes (with
    the same version of zstd). A section is copied at most once. Raises ConfigError for an argument
    that no frame can hold.
    """
    if codec not in get_args(Codec):
        raise ConfigError(f"codec {codec!r}", "is unknown", "use 'zstd' or 'none'")
    views = {name: _bytes_view(f"section {name!r}", data) for name, data in sections.items()}
    _check_size("sections", sum(map(len, views.values())), MAX_FRAME_BYTES)
    compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
    rows: list[list[Any]] = []
    payload: list[Buffer] = []
    for name, raw in views.items():
        stored: Buffer = raw
        if codec == "zstd":
            packed = compressor.compress(raw)
            stored = packed if len(packed) < len(raw) <= _max_raw(len(packed)) else raw
        used = "none" if stored is raw else "zstd"
        rows.append([name, used, len(stored), len(raw), _sha256(stored).digest()])
        payload.append(stored)
    content = {
        "kind": kind,
        "key": key,
        "variant": variant,
        "schema": schema,
        "created_ns": time.time_ns() if created_ns is None else created_ns,
        "producer": f"s3cache/{__version__}",
        "meta": dict(meta or {}),
        "sections": rows,
    }
    try:
        header = _pack(content)
        if len(header) > MAX_HEADER_BYTES:
            raise _bad_header(f"it takes {len(header)} bytes, more than {MAX_HEADER_BYTES}")
        _parse_header(memoryview(header))  # as a reader will
    except (CorruptError, TypeError, ValueError, OverflowError) as exc:
        problem = exc.problem if isinstance(exc, CorruptError) else str(exc)
        fix = "use printable ASCII in names, plain values in meta, and sections for all else"
        raise ConfigError("frame header", problem, fix) from None
    digest = _sha256(_FIELDS.pack(MAGIC, VERSION, 0, len(header)) + header).digest()
    return _join(b"", digest, header, payload)


def signed(entry: Frame, sign: Callable[[bytes], bytes]) -> bytes:
    """Return ``entry`` with the signatures (or ``b""``) that ``sign`` returns for its digest."""
    _check_size("signatures", len(signatures := sign(entry.digest)), MAX_SIGNED_BYTES)
    start = PRELUDE_BYTES + len(entry.signatures)
    end = _payload_start(entry)
    return _join(signatures, entry.digest, entry._view[start:end], [entry._view[end:]])


def with_variant(entry: Frame, variant: str) -> Frame:
    """Return an unsigned entry with the content of ``entry`` and another variant."""
    names = ("kind", "key", "schema", "meta")
    same: dict[str, Any] = {name: getattr(entry.header, name) for name in names}
    sections = {name: entry.section(name) for name in entry.names}
    return decode(encode(**same, variant=variant, sections=sections))


def _join(signatures: bytes, digest: bytes, header: Buffer, payload: list[Buffer]) -> bytes:
    prelude = _FIELDS.pack(MAGIC, VERSION, len(signatures), len(header))
    chunks = [prelude, digest, signatures, header, *payload]
    _check_size("frame", sum(map(len, chunks)), MAX_FRAME_BYTES)
    return b"".join(chunks)


def _check_size(thing: str, size: int, most: int) -> None:
    if size > most:
        fix = "use less metadata and smaller sections, or several entries"
        raise ConfigError(thing, f"takes {size} bytes, more than {most}", fix)


# -- reading


def decode(data: Buffer, *, admit: TrustCheck | None = None) -> Frame:
    """Read a whole frame and check it against its digests; nothing is decompressed or copied.

    Raises:
        TruncatedError: the bytes end too early.
        CorruptError: they are not one sound frame of this version.
        ConfigError: ``data`` is not a contiguous buffer.
        Exception: ``admit`` raises it; it is called before the header is parsed.
    """
    view = _bytes_view("frame", data)
    head = decode_head(view, admit=admit)
    if len(view) < head.size:
        raise TruncatedError("frame payload", len(view), head.size)
    if len(view) > head.size:
        raise CorruptError("frame end", f"{len(view) - head.size} bytes follow the last section")
    entry = Frame(head.header, head.digest, head.signatures, head.size, data, view)
    for section, stored in entry._stored():
        if _sha256(stored).digest() != section.digest:
            raise CorruptError(f"section {section.name!r}", "its bytes do not match their digest")
    return entry


def decode_head(first_bytes: Buffer, *, admit: TrustCheck | None = None) -> Head:
    """Read the head from the first bytes of a frame, such as a ranged read.

    Raises:
        TruncatedError: read at least ``needed`` bytes and call again; two reads are enough from
            48 bytes on, and one is usually enough with :data:`HEADER_HINT_BYTES`.
        CorruptError: this is not a well-formed header of this version.
        ConfigError: ``first_bytes`` is not a contiguous buffer.
        Exception: ``admit`` raises it.
    """
    view = _bytes_view("frame", first_bytes)
    # The magic first: do not ask for more bytes if this is not a frame.
    if view[: len(MAGIC)] != MAGIC[: len(view)]:
        raise CorruptError("frame magic", f"{bytes(view[: len(MAGIC)])!r} is not that of a frame")
    if len(view) < PRELUDE_BYTES:
        raise TruncatedError("frame prelude", len(view), PRELUDE_BYTES)
    _, version, signed_size, header_size = _FIELDS.unpack_from(view)
    if version != VERSION:
        problem = f"found {version}, this s3cache reads {VERSION} and nothing else"
        raise CorruptError("frame version", problem)
    if signed_size > MAX_SIGNED_BYTES or header_size > MAX_HEADER_BYTES:
        problem = f"signed_size {signed_size} or header_size {header_size} is too large"
        raise CorruptError("frame prelude", problem)
    start = PRELUDE_BYTES + signed_size
    end = start + header_size
    if len(view) < end:
        raise TruncatedError("frame header", len(view), end)
    digest = bytes(view[_FIELDS.size : PRELUDE_BYTES])
    hasher = _sha256(_FIELDS.pack(MAGIC, version, 0, header_size))
    hasher.update(view[start:end])
    if hasher.digest() != digest:
        raise _bad_header("its bytes do not match their digest")
    signatures = bytes(view[PRELUDE_BYTES:start])
    if admit is not None:
        admit(digest, signatures)
    header = _parse_header(view[start:end])
    size = end + sum(section.stored_size for section in header.sections)
    if size > MAX_FRAME_BYTES:
        raise _bad_header(f"the frame takes {size} bytes, more than {MAX_FRAME_BYTES}")
    return Head(header, digest, signatures, size)


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
            max_ext_len=0,  # accepts empty ones, which _is_plain refuses
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise _bad_header(f"not valid msgpack ({type(error).__name__}: {error})") from None
    if type(parsed) is not dict or tuple(parsed) != _HEADER_KEYS:
        raise _bad_header(f"not a map with the keys {', '.join(_HEADER_KEYS)}")
    rows = parsed["sections"]
    if type(rows) is not list:
        raise _bad_header("sections is not an array")
    header = Header(**(parsed | {"sections": tuple(map(_parse_section, rows))}))
    is_right = {
        **{name: _is_name(getattr(header, name)) for name in ("kind", "key", "producer")},
        "variant": header.variant == "" or _is_name(header.variant),
        "schema": _is_integer(header.schema, 32),
        "created_ns": _is_integer(header.created_ns, 63),
        "meta": type(header.meta) is dict and _is_plain(header.meta, MAX_META_DEPTH),
        "sizes": sum(section.raw_size for section in header.sections) <= MAX_FRAME_BYTES,
        "sections": len({section.name for section in header.sections}) == len(rows),
    }
    if wrong := [name for name, holds in is_right.items() if not holds]:
        raise _bad_header(f"{wrong[0]}: not what a frame may have")
    # A header must not be ambiguous: this refuses duplicate keys and padded integers.
    if _pack(parsed) != packed:
        raise _bad_header("not in canonical form")
    return header


def _parse_section(row: object) -> Section:
    if type(row) is not list or len(row) != 5:
        raise _bad_header("a section is not an array of 5")
    section = Section(*row)
    stored_size, raw_size, digest = section.stored_size, section.raw_size, section.digest
    is_right = (
        _is_name(section.name)
        and type(digest) is bytes
        and len(digest) == 32
        and _is_integer(stored_size, 63)
        and _is_integer(raw_size, 63)
        and (
            (section.codec == "none" and raw_size == stored_size)
            or (section.codec == "zstd" and stored_size < raw_size <= _max_raw(stored_size))
        )
    )
    if not is_right:
        raise _bad_header(f"section {repr(section.name)[:80]}: not what a frame may have")
    return section


def _bad_header(problem: str) -> CorruptError:
    return CorruptError("frame header", problem)


def _is_name(value: object) -> bool:
    return type(value) is str and _NAME.fullmatch(value) is not None


def _is_integer(value: object, bits: int) -> bool:
    return type(value) is int and 0 <= value < 1 << bits


def _is_plain(value: object, depth: int) -> bool:
    if type(value) is dict:
        items: list[object] = list(value.values())
        if any(type(key) is not str for key in value):
            return False
    elif type(value) is list:
        items = value
    else:
        return value is None or type(value) in (bool, int, float, str, bytes)
    return depth > 0 and all(_is_plain(item, depth - 1) for item in items)


def _decompress(section: Section, stored: memoryview) -> bytes:
    where = f"section {section.name!r}"
    try:
        # decompress() allocates the size that the zstd frame names and ignores max_output_size: so
        # that size must equal that of the header, which is within limits.
        if zstandard.frame_content_size(stored) != section.raw_size:
            raise CorruptError(where, "its zstd frame states another size than the header")
        # Not thread-safe, so make a new one each time, which costs 8 µs.
        return zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptError(where, f"does not decompress ({error})") from None


def _pack(content: dict[str, Any]) -> bytes:
    return cast("bytes", msgpack.packb(content, use_bin_type=True, strict_types=True))


def _max_raw(stored_size: int) -> int:
    return MAX_RATIO * stored_size + RATIO_SLACK_BYTES


def _bytes_view(thing: str, data: Buffer) -> memoryview:
    """Return ``data`` as a flat read-only view of its bytes."""
    try:
        view = memoryview(data)
        return (view.cast("B") if view.nbytes else memoryview(b"")).toreadonly()
    except TypeError as exc:
        raise ConfigError(thing, str(exc), "give contiguous bytes") from None
