"""s3cache beside torch alone: no program may start slower with it, on no disk."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Started", "not_warm", "worse"]

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "compile-cache.md"
_CODES = re.compile(r"`([a-z-]+)`")


@dataclass(frozen=True)
class Started:
    """How a program started in one process: graphs lowered there, files of C++ compiled."""

    lowered: int
    compilers: int

    @classmethod
    def of(cls, found: Mapping[str, object]) -> Started:
        """From what a job returns: ``lowered``, and ``started``, a line for each process."""
        lowered, started = found["lowered"], found["started"]
        assert isinstance(lowered, int)
        assert isinstance(started, list)
        # What torch asks of a compiler once in a process, it asks for whichever program is first.
        return cls(lowered, sum(".cpp'" in each for each in started))


def worse(ours: Started, alone: Started) -> list[str]:
    """What a process with s3cache does more often than one without, on a disk of the same past."""
    pairs = [
        ("lowered", ours.lowered, alone.lowered),
        ("compilers", ours.compilers, alone.compilers),
    ]
    return [f"{what}: {mine}, alone {theirs}" for what, mine, theirs in pairs if mine > theirs]


def not_warm(started: Started, reasons: Collection[str]) -> list[str]:
    """Why a start on an empty disk is neither warm nor accounted for.

    Nothing is compiled, unless graphs were bypassed under codes that the documentation has.
    """
    if started == Started(0, 0):
        return []
    strange = sorted({*reasons} - documented())
    return [f"{code} is not documented" for code in strange] or (
        [] if reasons else [f"{started} without a reason"]
    )


def documented() -> set[str]:
    """The codes in the first column of the table of reasons."""
    rows = [line for line in _PAGE.read_text(encoding="utf-8").splitlines() if line[:3] == "| `"]
    return {code for row in rows for code in _CODES.findall(row.split("|")[1])}
