"""``s3cache check``: run a program to find out which of its graphs can be cached.

The program compiles as usual, in processes of its own, with s3cache over a temporary local tier:
each graph goes the whole way, to a saved entry or to the reasons why there is none. The report is
that of :func:`s3cache.check`.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias

from s3cache.errors import UnsupportedTorchError
from s3cache.graph import BypassReason, Component, Graph, GraphBreak, Report
from s3cache.manage.job import Job, quiet_for_s, steps_done
from s3cache.records import Record, Run
from s3cache.torch_api import installed_version, internals

__all__ = ["End", "Limits", "check_program"]

#: How the program ended: by itself; as it has done its steps, compiled so many graphs, or compiles
#: nothing more; out of time; by Ctrl-C.
End: TypeAlias = Literal["itself", "steps", "graphs", "quiet", "timeout", "interrupted"]


@dataclass(frozen=True)
class Limits:
    """When a program has shown enough; ``None`` for never.

    Attributes:
        quiet_s: it has compiled something, and then nothing for so long.
        steps: its optimizers have stepped so often since it first compiled.
        graphs: so many graphs were looked at.
        timeout_s: in any case.
    """

    quiet_s: float | None = None
    steps: int | None = None
    graphs: int | None = None
    timeout_s: float | None = None


def check_program(program: Sequence[str], limits: Limits, *, to_stderr: bool = False) -> Report:
    """Run ``program``, which is what follows ``python``, until it has shown enough.

    It compiles as usual. The environment's settings of s3cache do not apply: no remote is needed,
    and nothing is looked up or left in one, unless the program turns one on itself.

    Args:
        to_stderr: send what it writes to its standard output to standard error.

    Raises:
        UnsupportedTorchError: nothing would be cached, for this torch is not supported.
        ConfigError: it cannot be run.
    """
    if not internals.is_supported():
        raise UnsupportedTorchError(
            f"torch {installed_version()} is not supported, so nothing of it is cached; use one "
            "that docs/compatibility.md names"
        )
    others = {name: text for name, text in os.environ.items() if not name.startswith("S3CACHE_")}
    with tempfile.TemporaryDirectory(prefix="s3cache-check-", ignore_cleanup_errors=True) as place:
        command = [sys.executable, "-m", "s3cache", "run", *program]
        environment = {**others, "S3CACHE_SUMMARY": "0", "S3CACHE_SHAPE_PROFILE": "0"}
        root = str(Path(place) / "local")
        with Job(command, root, environment, to_stderr=to_stderr) as job:
            end = _wait(job, limits)
        runs = sorted(job.runs(), key=lambda run: run.started)
        breaks = [GraphBreak(at["reason"], at["where"]) for run in runs for at in run.breaks]
        return Report(
            graphs=_graphs(runs),
            breaks=tuple(dict.fromkeys(breaks)),
            complete=all(run.complete for run in runs),
            program={
                "end": end,
                "exit_code": job.exit_code if end == "itself" else None,
                "steps": steps_done(runs),
            },
        )


def _wait(job: Job, limits: Limits) -> End:
    try:
        for runs in job.looks(limits.timeout_s):
            if job.exit_code is not None:
                return "itself"
            if (end := _enough(runs, limits)) is not None:
                return end
    except KeyboardInterrupt:
        return "interrupted"
    return "timeout"


def _enough(runs: Sequence[Run], limits: Limits) -> End | None:
    quiet_s = quiet_for_s(runs)
    if quiet_s < 0:
        return None
    if limits.graphs is not None and len(_graphs(runs)) >= limits.graphs:
        return "graphs"
    if limits.steps is not None and steps_done(runs) >= limits.steps and quiet_s > 0:
        return "steps"
    if limits.quiet_s is not None and quiet_s >= limits.quiet_s:
        return "quiet"
    return None


def _graphs(runs: Sequence[Run]) -> tuple[Graph, ...]:
    """Return each graph once, with the reasons of one that was refused when it was saved."""
    records = [each for run in runs for each in run.records if each.level == "aot"]
    refused = {each.key: each for each in records if each.outcome == "bypass" and each.key}
    found: dict[object, list[Record]] = {}
    for record in records:
        if not (record.outcome == "bypass" and record.key):
            messages = tuple(each.get("message", "") for each in record.reasons)
            found.setdefault(record.key or (record.where, messages), []).append(record)
    return tuple(_graph(lookups, refused.get(lookups[0].key)) for lookups in found.values())


def _graph(lookups: Sequence[Record], refusal: Record | None) -> Graph:
    first = lookups[0]
    size = re.search(r"(\d+) nodes", first.components.get("gm", ("", ""))[1])
    return Graph(
        nodes=int(size[1]) if size else 0,
        key=None if refusal else first.key or None,
        components={name: Component(*pair) for name, pair in first.components.items()},
        reasons=tuple(map(_reason, (refusal or first).reasons)),
        where=first.where,
        times=len(lookups),
    )


def _reason(recorded: Mapping[str, str]) -> BypassReason:
    given: Any = {each.name: recorded.get(each.name, "") for each in fields(BypassReason)}
    return BypassReason(**given)
