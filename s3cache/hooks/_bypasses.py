"""What becomes of a graph that is not cached: it is counted, and each reason is told once.

Each reason is a warning when it is first met, with the way out; met again it is told at level
INFO. So it is once there were as many as a log can bear.
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

_SHOWN_AT_MOST = 10  # of one graph
_TOLD_AT_MOST = 50  # of one session


class Bypasses:
    """Those of one session. Any thread may use it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._mutex = threading.Lock()
        self._told: set[tuple[str, str]] = set()

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
        self._engine.count_bypass({reason.code for reason in reasons})
        shown = reasons[:_SHOWN_AT_MOST]
        with self._mutex:
            room = len(self._told) < _TOLD_AT_MOST
            new = {(each.code, each.target) for each in shown} - self._told if room else set()
            self._told |= new
        if self._engine.settings.strict:  # it is raised instead
            new = set()
        lines = [f"{what} ({shown[0].code}): {shown[0]}"]
        for index, reason in enumerate(shown):
            if index:
                lines.append(f"  and ({reason.code}): {reason}")
            if reason.fix:  # on a line of its own, to be pasted
                lines.append(f"    {reason.fix}")
        if len(reasons) > len(shown):
            lines.append(f"  and {len(reasons) - len(shown)} more")
        codes = dict.fromkeys(each.code for each in shown if (each.code, each.target) in new)
        if codes:
            lines.append(f"    read on: {command(*codes)}")
        logger.log(
            logging.WARNING if new else logging.INFO,
            "%s",
            "\n".join(lines),
            exc_info=error if "error" in codes else None,
        )
