"""Native code as a file that the dynamic loader accepts, without a place on disk."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator

from s3cache.store import Buffer

__all__ = ["open_image"]


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
