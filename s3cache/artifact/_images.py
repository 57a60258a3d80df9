"""Shared libraries as bytes: whether one can be mapped, and what it says of where it was made."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from s3cache.errors import CorruptError
from s3cache.store import Buffer

__all__ = ["check_image", "hidden_places", "without_places"]

_ELF_64 = b"\x7fELF\x02"
_LOADED = 1  # PT_LOAD
_NO_SECTION = 0  # SHT_NULL
_IN_MEMORY = 2  # SHF_ALLOC
_DEBUG = (b".debug", b".zdebug")


def check_image(image: Buffer) -> None:
    """Check that the dynamic loader maps nothing beyond the end of ``image``.

    It checks little by itself, and touching such a page ends the process (SIGBUS). Images of
    another format than 64-bit ELF are left to the loader.

    Raises:
        CorruptError: the image is cut short.
    """
    if bytes(image[:5]) != _ELF_64:
        return
    order = _order(image)
    try:
        for at in _headers(image, order, table=32, counts=54):
            kind, _, start, _, _, in_file = struct.unpack_from(f"{order}IIQQQQ", image, at)
            if kind == _LOADED and start + in_file > len(image):
                raise CorruptError("kernel", "is cut short")
    except struct.error:
        raise CorruptError("kernel", "is cut short") from None


def without_places(image: Buffer, *prefixes: str) -> Buffer:
    """Return ``image`` without what debuggers read, and with dots for paths below ``prefixes``.

    Both name directories of the machine that compiled it. Nothing moves: what is left out becomes
    zeros, which take no room once compressed, in sections that say that they are none; a path keeps
    its length and its end, for linkers share the ends of strings. An image of another format than
    64-bit ELF, or one that is not understood, keeps its debugging sections.
    """
    mended = bytearray(image)
    if bytes(image[:5]) == _ELF_64:
        try:
            for at, start, size in list(_debugging(image)):
                mended[start : start + size] = bytes(size)
                struct.pack_into(f"{_order(image)}I", mended, at + 4, _NO_SECTION)
        except (struct.error, IndexError, CorruptError):
            mended = bytearray(image)
    return hidden_places(mended, *prefixes)


def hidden_places(data: Buffer, *prefixes: str) -> bytes:
    """Return ``data`` with dots for paths that begin with ``prefixes``; nothing moves."""
    hidden = bytes(data)
    for prefix in filter(None, map(str.encode, prefixes)):
        hidden = hidden.replace(prefix + b"/", b"/".ljust(len(prefix), b".") + b"/")
    return hidden


def _debugging(image: Buffer) -> Iterator[tuple[int, int, int]]:
    """Yield where the header of each such section is, where the section begins, and its size."""
    order = _order(image)
    headers = list(_headers(image, order, table=40, counts=58))
    (of_names,) = struct.unpack_from(f"{order}H", image, 62)
    if not headers:
        return
    names_at, names_size = struct.unpack_from(f"{order}QQ", image, headers[of_names] + 24)
    names = bytes(image[names_at : names_at + names_size])
    for at in headers:
        name, _, flags, _, start, size = struct.unpack_from(f"{order}IIQQQQ", image, at)
        is_debugging = names[name:].startswith(_DEBUG) and not flags & _IN_MEMORY
        if is_debugging and start + size <= len(image):
            yield at, start, size


def _order(image: Buffer) -> str:
    return "<" if bytes(image[5:6]) == b"\x01" else ">"


def _headers(image: Buffer, order: str, *, table: int, counts: int) -> Iterator[int]:
    """Yield where each header begins of a table that ELF describes at ``table`` and ``counts``."""
    (offset,) = struct.unpack_from(f"{order}Q", image, table)
    size, count = struct.unpack_from(f"{order}HH", image, counts)
    if size < struct.calcsize(f"{order}IIQQQQ") or (not count and table == 32):
        raise CorruptError("kernel", "has no program headers")
    yield from range(offset, offset + size * count, size)
