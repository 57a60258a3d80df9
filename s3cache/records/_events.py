"""What else took time beside lookups: transfers, compiles and saves, for a timeline."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from s3cache.stats import TransferEvent

__all__ = ["Event", "Transfers"]

# Transfers whose end nobody has told of: no more are remembered.
_OPEN_AT_MOST = 10_000


@dataclass(frozen=True)
class Event:
    """Something that took a while.

    Attributes:
        event: ``download``, ``upload``, ``compile`` or ``save``.
        time: Unix time of the end.
        elapsed_s: how long it took.
        name: the object or key that it was about.
        size: bytes, as far as known.
        ended: ``done``, ``absent`` or ``failed``.
    """

    event: str
    time: float
    elapsed_s: float
    name: str = ""
    size: int = 0
    ended: str = "done"

    def as_dict(self) -> dict[str, Any]:
        """All that is not empty, as JSON can hold it."""
        return {name: value for name, value in vars(self).items() if value}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Event:
        """What :meth:`as_dict` gave; names that a later release has added are left out.

        Raises:
            TypeError, ValueError, KeyError: it is something else.
        """
        return cls(
            event=str(data["event"]),
            time=float(data["time"]),
            elapsed_s=float(data.get("elapsed_s", 0.0)),
            name=str(data.get("name", "")),
            size=int(data.get("size", 0)),
            ended=str(data.get("ended", "done")),
        )


class Transfers:
    """Makes an event of each upload and download, of its steps; any thread may tell it of them.

    Args:
        tell: is told of each when it has ended.
    """

    def __init__(self, tell: Callable[[Event], None]) -> None:
        self._tell = tell
        self._began: dict[tuple[str, str], float] = {}

    def note(self, step: TransferEvent) -> None:
        """See one step; a transfer that is tried again begins anew."""
        which = step.direction, step.name
        if step.step == "started":
            if len(self._began) < _OPEN_AT_MOST:
                self._began[which] = time.time()
        elif step.step in ("done", "absent", "failed"):
            began = self._began.pop(which, None)
            if began is not None:
                now = time.time()
                took = max(now - began, 0.0)
                self._tell(Event(step.direction, now, took, step.name, step.size, step.step))
