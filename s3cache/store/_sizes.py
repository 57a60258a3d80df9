"""How large an object is, told before its body is read: memory can be refused to it then."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

__all__ = ["announce", "sizes_told_to"]

_told: ContextVar[Callable[[int], None] | None] = ContextVar("s3cache_sizes", default=None)


@contextlib.contextmanager
def sizes_told_to(listener: Callable[[int], None]) -> Iterator[None]:
    """Have ``listener`` called with the size, in bytes, of each object that is got within.

    Whatever it raises ends that ``get``; raise ``asyncio.CancelledError``, which no store takes for
    a fault of its own.
    """
    token = _told.set(listener)
    try:
        yield
    finally:
        _told.reset(token)


def announce(size: int) -> None:
    """Called by a store that knows the size of an object that it is about to read."""
    listener = _told.get()
    if listener is not None:
        listener(size)
