"""What a run consists of, as plain data: lookups, and what else took time beside them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from s3cache.stats import TransferEvent

__all__ = ["MAX_LINE_BYTES", "Event", "Lanes", "Record", "Transfers", "texts_of"]

#: A line of a file of records is no longer; what is longer is left out.
MAX_LINE_BYTES = 512 << 10
# Transfers whose end nobody has told of: no more are remembered.
_OPEN_AT_MOST = 10_000


@dataclass(frozen=True)
class Record:
    """What became of one lookup.

    Attributes:
        level: ``aot`` for a whole graph, ``fx`` for a half of one.
        outcome: ``hit``, ``miss`` or ``bypass``.
        key: what was looked up; ``""`` where there is none.
        reason: why it missed; of a hit, the tier that had it.
        time: Unix time of the end.
        elapsed_s: how long it took.
        saved_s: of a hit, what making it took where it was made.
        where: file, line and function that called what was compiled, outside of torch.
        of_whole: whether it is a half of a graph whose whole was looked up before.
        components: what the key is made of, by name: the digest and a readable value.
        parts: of a miss, what components consist of whose value does not say it, by name.
        rejected: of a miss, what kept entries under the key from being used, each in a line.
        reasons: why it was bypassed: code, message, fix, and the line in the user's program.
    """

    level: str
    outcome: str
    key: str = ""
    reason: str = ""
    time: float = 0.0
    elapsed_s: float = 0.0
    saved_s: float = 0.0
    where: tuple[str, int, str] | None = None
    of_whole: bool = False
    components: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    parts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    rejected: tuple[str, ...] = ()
    reasons: tuple[Mapping[str, str], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """All that is not empty, as JSON can hold it."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name))}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Record:
        """What :meth:`as_dict` gave; names that a later release has added are left out.

        Raises:
            TypeError, ValueError, KeyError, AttributeError: it is something else.
        """
        known = {each.name for each in fields(cls)}
        given = {name: value for name, value in data.items() if name in known}
        if where := given.get("where"):
            file, line, function = where
            given["where"] = (str(file), int(line), str(function))
        given["components"] = {
            str(name): (str(digest), str(value))
            for name, (digest, value) in given.get("components", {}).items()
        }
        given["parts"] = texts_of(given.get("parts", {}))
        given["rejected"] = tuple(str(text) for text in given.get("rejected", ()))
        given["reasons"] = tuple(
            {str(name): str(text) for name, text in reason.items()}
            for reason in given.get("reasons", ())
        )
        for name in ("level", "outcome", "key", "reason"):
            given[name] = str(given.get(name, ""))
        for name in ("time", "elapsed_s", "saved_s"):
            given[name] = float(given.get(name, 0.0))
        return cls(**given)


def texts_of(value: Any) -> dict[str, dict[str, str]]:
    """``value``, if it is a mapping of mappings of texts.

    Raises:
        TypeError, AttributeError: it is something else.
    """
    found: dict[str, dict[str, str]] = {}
    for name, parts in value.items():
        found[str(name)] = {str(part): str(text) for part, text in parts.items()}
    return found


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


class Lanes:
    """Gives each of many spans a lane in which no other one overlaps it.

    Spans may come in any order; in that of their beginning it takes as many lanes as there were
    spans at once.
    """

    def __init__(self) -> None:
        self._ends: list[float] = []  # by lane

    def take(self, began: float, ended: float) -> int:
        """The lane of a span, counted from 0."""
        free = next((lane for lane, end in enumerate(self._ends) if end <= began), len(self._ends))
        self._ends[free : free + 1] = [ended]
        return free
