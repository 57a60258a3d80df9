"""What becomes of a graph that is not cached: it is counted, and each kind of reason is told once.

The first of a kind is a warning, with the way out; the others are told at level INFO.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from s3cache._logs import logger_of
from s3cache._pages import command
from s3cache.cache import Engine
from s3cache.graph import Unsafe

__all__ = ["Bypasses"]

logger = logger_of("bypasses")


class Bypasses:
    """Those of one session. Any thread may use it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._mutex = threading.Lock()
        self._told: set[str] = set()

    def met(
        self,
        reasons: Sequence[Unsafe],
        error: Exception | None = None,
        *,
        what: str = "a graph is not cached as a whole",
    ) -> None:
        """Count a graph that is not cached for ``reasons``, and tell of them.

        Args:
            error: what led to it, for reason ``error``: a mistake of ours needs its traceback.
        """
        codes = {reason.code for reason in reasons}
        self._engine.count_bypass(codes)
        with self._mutex:
            new = codes - self._told
            self._told |= codes
        if self._engine.settings.strict:  # it is raised instead
            new.clear()
        lines = [f"{what} ({reasons[0].code}): {reasons[0]}"]
        for index, reason in enumerate(reasons):
            if index:
                lines.append(f"  and ({reason.code}): {reason}")
            if reason.fix:  # on a line of its own, to be pasted
                lines.append(f"    {reason.fix}")
        if new:
            told = dict.fromkeys(reason.code for reason in reasons if reason.code in new)
            lines.append(f"    read on: {command(*told)}")
        logger.log(
            logging.WARNING if new else logging.INFO,
            "%s",
            "\n".join(lines),
            exc_info=error if "error" in new else None,
        )
