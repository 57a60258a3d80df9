"""What a run consists of, as plain data: its lookups, and what else took time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from s3cache.stats import TransferEvent

#: Longer lines are left out of a file of records.
MAX_LINE_BYTES = 512 << 10
# Transfers under way that are remembered at most: an end may never be reported.
_OPEN_AT_MOST = 10_000

_R = TypeVar("_R", "Record", "Event")


@dataclass(frozen=True)
class Record:
    """The outcome of one lookup.

    Attributes:
        level: ``aot`` for a whole graph, ``fx`` for an FX graph of a forward or backward.
        outcome: ``hit``, ``miss`` or ``bypass``.
        key: what was looked up; ``""`` where there is none.
        reason: why it missed; of a hit, the tier that had it.
        time: Unix time of the end.
        elapsed_s: how long it took.
        saved_s: of a hit, how long compiling it took where it was compiled.
        where: file, line and function that called what was compiled, outside of torch.
        of_whole: whether it is an FX graph of a whole graph that was looked up before.
        components: what the key is made of, by name: the digest and a readable value.
        parts: of a miss, the details of components, where their value does not show them.
        rejected: of a miss, why each entry under the key was not used, each in a line.
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
        """Return all fields that are not empty, as JSON can hold them."""
        return _not_empty(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Record:
        """Return the record that :meth:`as_dict` gave; unknown fields are left out.

        Raises:
            TypeError, ValueError, KeyError, AttributeError: it is something else.
        """
        return _from_dict(cls, data)


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
        """Return all fields that are not empty, as JSON can hold them."""
        return _not_empty(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Event:
        """Return the event that :meth:`as_dict` gave; unknown fields are left out.

        Raises:
            TypeError, ValueError, KeyError, AttributeError: it is something else.
        """
        return _from_dict(cls, {"elapsed_s": 0.0, **data})


def _not_empty(record: Record | Event) -> dict[str, Any]:
    return {each.name: value for each in fields(record) if (value := getattr(record, each.name))}


def _from_dict(kind: type[_R], data: Mapping[str, Any]) -> _R:
    given = {each.name: (each, data[each.name]) for each in fields(kind) if each.name in data}
    return kind(**{name: _READ[str(each.type)](value) for name, (each, value) in given.items()})


# How a field of a type is read from JSON, which others may have written: as that type, or not.
_READ: dict[str, Callable[[Any], Any]] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": bool,
    "tuple[str, int, str] | None": lambda value: (str(value[0]), int(value[1]), str(value[2])),
    "tuple[str, ...]": lambda value: tuple(map(str, value)),
    "tuple[Mapping[str, str], ...]": lambda value: tuple(map(_texts, value)),
    "Mapping[str, Mapping[str, str]]": lambda value: {
        str(name): _texts(texts) for name, texts in value.items()
    },
    "Mapping[str, tuple[str, str]]": lambda value: {
        str(name): (str(digest), str(text)) for name, (digest, text) in value.items()
    },
}


def _texts(value: Mapping[Any, Any]) -> dict[str, str]:
    return {str(name): str(text) for name, text in value.items()}


@dataclass(frozen=True)
class Run:
    """The lookups of one process, the oldest first.

    Attributes:
        name: what ``--run`` takes.
        program: the script that it ran, as it was called.
        file: the whole path of that script.
        module: the name of the module, if ``-m`` ran it.
        started: Unix time.
        rank: of a distributed job, if it is one.
        complete: whether all its lookups are here; a very long run has more.
        job: the job of the process, as its environment named it, see :func:`in_jobs`.
        pid, parent: of the process.
        events: what else took time beside lookups.
        compiling: whether it was compiling at its last note; only of a process that is watched, as
            the following.
        noted: Unix time of that note; 0 for never.
        steps: how often each of its optimizers has stepped since it first compiled.
        breaks: where Dynamo broke graphs, and why.
    """

    name: str
    records: tuple[Record, ...]
    program: str = ""
    started: float = 0.0
    rank: str = ""
    complete: bool = True
    job: str = ""
    pid: int = 0
    parent: int = 0
    events: tuple[Event, ...] = ()
    compiling: bool = False
    noted: float = 0.0
    steps: int = 0
    breaks: tuple[Mapping[str, str], ...] = ()
    file: str = ""
    module: str = ""


class Transfers:
    """Make an event of each upload and download from its steps; any thread may report them.

    Args:
        add: is called with each event when the transfer has ended.
    """

    def __init__(self, add: Callable[[Event], None]) -> None:
        self._add = add
        self._began: dict[tuple[str, str], float] = {}

    def note(self, step: TransferEvent) -> None:
        """Take one step; a transfer that is tried again begins again."""
        which = step.direction, step.name
        if step.step == "started":
            if len(self._began) < _OPEN_AT_MOST:
                self._began[which] = time.time()
        elif step.step in ("done", "absent", "failed"):
            began = self._began.pop(which, None)
            if began is not None:
                now = time.time()
                took = max(now - began, 0.0)
                self._add(Event(step.direction, now, took, step.name, step.size, step.step))


class Lanes:
    """Assign each of many spans a lane in which it overlaps no other.

    Spans may come in any order; in that of their beginning they take as many lanes as there were
    spans at once.
    """

    def __init__(self) -> None:
        self._ends: list[float] = []  # by lane

    def take(self, began: float, ended: float) -> int:
        """Return the lane of a span, counted from 0."""
        free = next((lane for lane, end in enumerate(self._ends) if end <= began), len(self._ends))
        self._ends[free : free + 1] = [ended]
        return free
