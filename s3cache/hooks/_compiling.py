"""What one thread's compile has come to, told from one seam to the next."""

from __future__ import annotations

import threading
from typing import Any

from s3cache.cache import Hit

__all__ = ["Compiling"]


class Compiling(threading.local):
    """State of the lookup or save that runs on this thread.

    torch swallows what its cache raises. What s3cache has met is kept here too, so that strict
    mode can raise it where torch does not swallow any more.

    Attributes:
        key: the key of the graph that is looked up, or ``None`` if it has none.
        candidate: the entry that torch judges or rebuilds now, and where it came from.
        entry: the entry that is being saved.
        error: the first thing that went wrong.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget the last one."""
        self.key: str | None = None
        self.candidate: tuple[Any, Hit] | None = None
        self.entry: Any = None
        self.error: Exception | None = None

    def met(self, error: Exception) -> None:
        """Keep ``error``, if it is the first."""
        self.error = self.error or error
