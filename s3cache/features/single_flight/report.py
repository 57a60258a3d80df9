"""Which processes compiled for others, and which waited for which."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from s3cache.insight import duration, names_of, with_name
from s3cache.records import Run
from s3cache.util.text import counted


def report(runs: Sequence[Run]) -> tuple[Mapping[str, object], Sequence[str]]:
    """Return a line for each process that compiled or waited; none if no process waited."""
    names, lines, has_waited = names_of(runs), list[str](), False
    for run in runs:
        count = sum(event.event == "claim" for event in run.events)
        parts = [f"compiled {counted(count, 'graph')}"] if count else []
        waits: dict[str, list[float]] = defaultdict(list)
        for event in run.events:
            if event.event == "wait":
                waits[event.ended].append(event.elapsed_s)
        for ended, seconds in waits.items():
            graphs, took = counted(len(seconds), "graph"), duration(sum(seconds))
            parts.append(f"waited {with_name(ended, names)}: {graphs}, {took}")
        if parts:
            lines.append(f"{names[str(run.pid)]}: {'; '.join(parts)}")
        has_waited = has_waited or bool(waits)
    lines = lines if has_waited else []
    return {"shared": lines}, lines
