"""Native code as a file that the dynamic loader accepts, without a place on disk."""

from __future__ import annotations

import contextlib
import os
import struct
import tempfile
from collections.abc import Iterator

from s3cache.errors import CorruptError
from s3cache.store import Buffer

__all__ = ["check_image", "open_image"]

_LOADED = 1  # PT_LOAD


def check_image(image: Buffer) -> None:
    """Raises :class:`CorruptError` if the loader would map what is not there.

    It checks little by itself: touching a page beyond the end of a library that was cut short ends
    the process (SIGBUS). Images of another format than 64-bit ELF are left to the loader.
    """
    if bytes(image[:5]) != b"\x7fELF\x02":
        return
    order = "<" if bytes(image[5:6]) == b"\x01" else ">"
    try:
        offset, size, count = _program_headers(image, order)
        for at in range(offset, offset + size * count, size):
            kind, _, start, _, _, in_file = struct.unpack_from(f"{order}IIQQQQ", image, at)
            if kind == _LOADED and start + in_file > len(image):
                raise CorruptError("kernel", "is cut short")
    except struct.error:
        raise CorruptError("kernel", "is cut short") from None


def _program_headers(image: Buffer, order: str) -> tuple[int, int, int]:
    (offset,) = struct.unpack_from(f"{order}Q", image, 32)
    size, count = struct.unpack_from(f"{order}HH", image, 54)
    if size < struct.calcsize(f"{order}IIQQQQ") or not count:
        raise CorruptError("kernel", "has no program headers")
    return offset, size, count


@contextlib.contextmanager
def open_image(image: Buffer, name: str) -> Iterator[str]:
    """A path ending in ``.so`` under which ``image`` can be loaded while the block runs.

    The bytes live in memory (``memfd_create``): nobody can exchange them between being verified
    and being loaded, and a ``noexec`` temporary directory, which only gets a link to them, does
    not matter. Where the system has no such files, a private temporary one is used. Nothing is
    left behind.

    Raises:
        OSError: neither can be made.
    """
    with tempfile.TemporaryDirectory(prefix="s3cache-") as directory:
        path = os.path.join(directory, "kernel.so")
        try:
            fd = os.memfd_create(name[:64], os.MFD_CLOEXEC)
        except (AttributeError, OSError):
            with open(path, "wb") as file:
                file.write(image)
            yield path
            return
        try:
            with os.fdopen(os.dup(fd), "wb") as file:
                file.write(image)
            os.symlink(f"/proc/self/fd/{fd}", path)
            yield path
        finally:
            os.close(fd)
