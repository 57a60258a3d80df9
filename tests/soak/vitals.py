"""What a process holds: from ``/proc``, without asking it."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Growth", "Vitals", "growth", "vitals"]


@dataclass(frozen=True)
class Vitals:
    """At one moment."""

    memory_mib: float
    threads: int
    sockets: int
    descriptors: int


@dataclass(frozen=True)
class Growth:
    """The median of one number early on, and in the end."""

    what: str
    early: float
    late: float
    most: float

    @property
    def is_flat(self) -> bool:
        """Not more than a quarter more, nor than a little: pools fill and caches of Python's do."""
        slack = {"memory_mib": 32.0, "threads": 4.0, "sockets": 8.0, "descriptors": 16.0}[self.what]
        return self.late <= max(1.25 * self.early, self.early + slack)


def vitals(pid: int) -> Vitals | None:
    """``None`` if the process is gone."""
    process = Path("/proc", str(pid))
    try:
        status = dict(
            line.split(":", 1)
            for line in (process / "status").read_text().splitlines()
            if ":" in line
        )
        targets = []
        for each in (process / "fd").iterdir():
            try:
                targets.append(os.readlink(each))
            except FileNotFoundError:
                continue  # closed meanwhile
        return Vitals(
            memory_mib=int(status["VmRSS"].split()[0]) / 1024,
            threads=int(status["Threads"]),
            sockets=sum(target.startswith("socket:") for target in targets),
            descriptors=len(targets),
        )
    except (OSError, KeyError):
        return None


def growth(samples: Sequence[Vitals]) -> list[Growth]:
    """Of the second fifth of the time against the last one: what starts is no leak."""
    fifth = max(1, len(samples) // 5)
    early, late = samples[fifth : 2 * fifth] or samples, samples[-fifth:]
    return [
        Growth(
            name,
            statistics.median(getattr(each, name) for each in early),
            statistics.median(getattr(each, name) for each in late),
            max(getattr(each, name) for each in samples),
        )
        for name in Vitals.__annotations__
    ]
