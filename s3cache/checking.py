"""What of a program can be cached, found out by running it: the report of :func:`s3cache.check` for
programs as they are.

The program compiles as it always does, in processes beside us, with s3cache over a local tier of
its own that is thrown away: each graph goes the whole way, to a saved entry or to the reasons why
there is none.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from s3cache.errors import UnsupportedTorchError
from s3cache.graph import Unsafe
from s3cache.jobs import Job, last_sign, steps_done
from s3cache.records import Record, Run
from s3cache.torch_api import installed_version, internals

__all__ = ["Checked", "CheckedGraph", "End", "Limits", "check_program"]

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


@dataclass(frozen=True)
class CheckedGraph:
    """A graph that torch compiled; equal ones of several processes are one.

    Attributes:
        key: under which it is cached; ``""`` if it has none.
        reasons: why it cannot be cached as a whole: code, message, fix, and the line in the
            program; empty if it can.
        where: file, line and function that called what was compiled.
        times: how often it was compiled, or looked up.
        nodes: what its key says of it, as ``graph of 6 nodes``.
    """

    key: str
    reasons: tuple[Mapping[str, str], ...]
    where: tuple[str, int, str] | None
    times: int
    nodes: str = ""

    @property
    def cacheable(self) -> bool:
        """Whether it can be cached as a whole."""
        return not self.reasons

    @property
    def in_halves(self) -> bool:
        """Whether, if not as a whole, its forward and backward are shared by themselves."""
        return bool(self.reasons) and not any(_in_any_form(each) for each in self.reasons)


@dataclass(frozen=True)
class Checked:
    """What a program came to.

    Attributes:
        end: how it ended.
        exit_code: its own, if it ended by itself.
        graphs: in the order in which they came.
        breaks: where Dynamo ended one graph and began the next, and why.
        steps: of its optimizers, once it had compiled.
        complete: whether everything that it compiled is here.
    """

    end: End
    exit_code: int | None
    graphs: tuple[CheckedGraph, ...]
    breaks: tuple[Mapping[str, str], ...]
    steps: int
    complete: bool

    @property
    def cacheable(self) -> bool:
        """Whether there is something to cache, and all of it can be."""
        return bool(self.graphs) and all(graph.cacheable for graph in self.graphs)

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {
            "cacheable": self.cacheable,
            "end": self.end,
            "exit_code": self.exit_code,
            "steps": self.steps,
            "complete": self.complete,
            "graphs": [
                {
                    "cacheable": graph.cacheable,
                    "in_halves": graph.in_halves,
                    "key": graph.key or None,
                    "reasons": [dict(reason) for reason in graph.reasons],
                    "where": graph.where,
                    "times": graph.times,
                }
                for graph in self.graphs
            ],
            "breaks": [dict(place) for place in self.breaks],
        }


def check_program(program: Sequence[str], limits: Limits, *, to_stderr: bool = False) -> Checked:
    """Run ``program``, which is what follows ``python``, until it has shown enough.

    It compiles as ever. What settings of s3cache there are is not asked for: no remote is needed,
    and nothing is looked up or left in one, unless the program turns on one by itself.

    Args:
        to_stderr: what it writes to its standard output goes to standard error.

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
        root = str(Path(place) / "local")
        job = Job(
            [sys.executable, "-m", "s3cache", "run", *program],
            root,
            {**others, "S3CACHE_SUMMARY": "0", "S3CACHE_SHAPE_PROFILE": "0"},
            to_stderr=to_stderr,
        )
        try:
            end = _until_enough(job, limits)
        finally:
            job.end()
        exit_code = job.exit_code if end == "itself" else None
        runs = sorted(job.runs(), key=lambda run: run.started)
        return Checked(
            end=end,
            exit_code=exit_code,
            graphs=_graphs(runs),
            breaks=_once(place for run in runs for place in run.breaks),
            steps=steps_done(runs),
            complete=all(run.complete for run in runs),
        )


def _until_enough(job: Job, limits: Limits) -> End:
    started = time.monotonic()
    try:
        while job.exit_code is None:
            if limits.timeout_s is not None and time.monotonic() - started > limits.timeout_s:
                return "timeout"
            end = _enough(job.runs(), limits)
            if end is not None:
                return end
            job.wait()
    except KeyboardInterrupt:
        return "interrupted"
    return "itself"


def _enough(runs: Sequence[Run], limits: Limits) -> End | None:
    last = last_sign(runs)
    if last is None:
        return None
    quiet_for_s = time.time() - last
    if limits.graphs is not None and len(_graphs(runs)) >= limits.graphs:
        return "graphs"
    if limits.steps is not None and steps_done(runs) >= limits.steps and quiet_for_s > 0:
        return "steps"
    if limits.quiet_s is not None and quiet_for_s >= limits.quiet_s:
        return "quiet"
    return None


def _graphs(runs: Sequence[Run]) -> tuple[CheckedGraph, ...]:
    """Each graph once; one that was looked up, and refused when it was saved, with its reasons."""
    records = [each for run in runs for each in run.records if each.level == "aot"]
    refused = {each.key: each for each in records if each.outcome == "bypass" and each.key}
    found: dict[object, list[Record]] = {}
    for record in records:
        if not (record.outcome == "bypass" and record.key):
            found.setdefault(record.key or (record.where, _messages(record)), []).append(record)
    return tuple(_graph(lookups, refused) for lookups in found.values())


def _graph(lookups: Sequence[Record], refused: Mapping[str, Record]) -> CheckedGraph:
    first = lookups[0]
    refusal = refused.get(first.key)
    return CheckedGraph(
        key="" if refusal else first.key,
        reasons=(refusal or first).reasons,
        where=first.where,
        times=len(lookups),
        nodes=first.components.get("gm", ("", ""))[1],
    )


def _once(places: Iterable[Mapping[str, str]]) -> tuple[Mapping[str, str], ...]:
    return tuple({tuple(place.items()): place for place in places}.values())


def _messages(record: Record) -> tuple[str, ...]:
    return tuple(each.get("message", "") for each in record.reasons)


def _in_any_form(reason: Mapping[str, str]) -> bool:
    names = ("code", "message")
    return Unsafe(**{name: reason.get(name, "") for name in names}).in_any_form  # type: ignore[arg-type]
