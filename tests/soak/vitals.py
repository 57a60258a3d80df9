"""What a process holds: from ``/proc``, without asking it."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from s3cache.store import S3Options

__all__ = ["Growth", "Vitals", "growth", "vitals"]

_CONNECTIONS = S3Options("any").max_pool_connections
_CALLS_TO_DISKS = 16  # at once, by threads that stay: s3cache/util/threads.py
_WORKERS = min(32, (os.cpu_count() or 1) + 4)  # as concurrent.futures has them
_OTHERS = 4  # the pair of sockets by which a loop wakes itself; the program's own threads

# What is kept for what comes next has a bound: as many as were in use at once, which a backlog
# after a server was away, or a disk that is slow for once, makes more than the quiet before.
_BOUNDS = {"sockets": _CONNECTIONS + _OTHERS, "threads": _CALLS_TO_DISKS + _WORKERS + _OTHERS}
# Of what has none: caches of Python's fill.
_SLACK = {"memory_mib": 32.0, "files": 16.0}


@dataclass(frozen=True)
class Vitals:
    """At one moment."""

    memory_mib: float
    threads: int
    sockets: int
    files: int  # every other descriptor


@dataclass(frozen=True)
class Growth:
    """The median of one number early on, and in the end."""

    what: str
    early: float
    late: float
    most: float

    @property
    def is_flat(self) -> bool:
        """Within its bound; else not more than a quarter more, nor than a little."""
        if self.what in _BOUNDS:
            return self.late <= _BOUNDS[self.what]
        return self.late <= max(1.25 * self.early, self.early + _SLACK[self.what])


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
            files=sum(not target.startswith("socket:") for target in targets),
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
