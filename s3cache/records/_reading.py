"""Read what processes of this machine have recorded, and group them by job."""

from __future__ import annotations

import base64
import json
import os
import stat
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from s3cache.records._record import Event, Record
from s3cache.records._writing import DIRECTORY, NAMED, SUFFIX
from s3cache.store import Directory

__all__ = [
    "Folded",
    "Run",
    "folded",
    "in_jobs",
    "ranks_in_words",
    "read_head",
    "read_run",
    "run_names",
]

# A pipe is not waited at for somebody to write.
_OLD = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_BYTES = 16 << 20
_MAX_PARTS_BYTES = 16 << 20
_HEAD_BYTES = 16 << 10
_N = TypeVar("_N", int, float)
_BAD = (AttributeError, KeyError, RecursionError, TypeError, ValueError)


@dataclass(frozen=True)
class Run:
    """The lookups of one process, the oldest first.

    Attributes:
        name: what ``--run`` takes.
        program: the script that it ran, as it was called.
        file: that script's whole path; older records lack it.
        module: its name, if ``-m`` ran it; older records lack it.
        started: Unix time.
        rank: of a distributed job, if it is one.
        complete: whether all its lookups are here; a very long run has more.
        job: what the environment said of the job that it was of, see :func:`in_jobs`.
        pid, parent: of the process.
        events: what else took time beside lookups.
        compiling: whether it compiled when it noted something last; only where it is watched, as
            the following.
        noted: when that was, Unix time; 0 for never.
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


def run_names(root: str) -> list[str]:
    """The names of all runs that are recorded in a local tier, the latest first.

    Raises:
        ConfigError: the directory may be another user's work.
        OSError: it cannot be read.
    """
    try:
        directory = Directory.at(root).enter(DIRECTORY)
    except FileNotFoundError:
        return []
    names = (name for name in directory.names() if name.endswith(SUFFIX))
    return [name.removesuffix(SUFFIX) for name in sorted(names, reverse=True)]


def read_run(root: str, name: str) -> Run:
    """That run, as far as it has got; a line that is damaged, or not whole yet, is left out.

    Raises:
        ConfigError: the directory may be another user's work.
        OSError: there is none of that name, or it cannot be read.
    """
    return _read(root, name, _MAX_BYTES)


def read_head(root: str, name: str) -> Run:
    """What is known of that run as a whole, without its lookups: cheap.

    Raises:
        ConfigError, OSError: as :func:`read_run`.
    """
    return replace(_read(root, name, _HEAD_BYTES), records=(), events=())


def _read(root: str, name: str, max_bytes: int) -> Run:
    directory = Directory.at(root).enter(DIRECTORY)
    fd = os.open(f"{name}{SUFFIX}", _OLD, dir_fd=directory.fd)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise PermissionError(f"{name} is not a file of ours")
        with os.fdopen(os.dup(fd), "rb") as file:
            lines = file.read(max_bytes).split(b"\n")
    finally:
        os.close(fd)
    head: dict[str, Any] = {}
    records = []
    events = []
    breaks = []
    for line in lines:
        try:
            value = json.loads(line)
            if "outcome" in value:
                records.append(Record.from_dict(_unpacked(value)))
            elif "event" in value:
                events.append(Event.from_dict(value))
            elif "graph_break" in value:
                place = value["graph_break"]
                breaks.append({"reason": str(place["reason"]), "where": str(place["where"])})
            else:
                head.update(value)
        except (*_BAD, zlib.error):
            continue
    return Run(
        name=name,
        records=tuple(records),
        program=str(head.get("program", "")),
        started=_number(head, "started", float),
        rank=str(head.get("rank", "")),
        complete="more" not in head,
        job=str(head.get("job", "")),
        pid=_number(head, "pid", int),
        parent=_number(head, "parent", int),
        events=tuple(events),
        compiling=head.get("compiling") is True,
        noted=_number(head, "at", float),
        steps=_number(head, "steps", int),
        breaks=tuple(breaks),
        file=str(head.get("file", "")),
        module=str(head.get("module", "")),
    )


def _number(head: Mapping[str, Any], name: str, kind: type[_N]) -> _N:
    found = head.get(name)
    return found if isinstance(found, kind) else kind()


def _unpacked(record: dict[str, Any]) -> dict[str, Any]:
    if parts := record.get("parts"):
        plain = zlib.decompressobj().decompress(base64.b85decode(parts), _MAX_PARTS_BYTES)
        record["parts"] = json.loads(plain)
    return record


# -- jobs: the ranks that a launcher has started, and what they start


def in_jobs(runs: Iterable[Run]) -> list[list[Run]]:
    """Those of each job together, the job that began last first; in a job by rank.

    A run that is of no job is one by itself.
    """
    jobs: list[list[Run]] = []
    open_jobs: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: (run.started, run.name)):
        job = open_jobs.get(run.job) if run.job else None
        if job is None or not _belongs(run, job):
            job = []
            jobs.append(job)
            open_jobs[run.job] = job
        job.append(run)
    for job in jobs:
        job.sort(key=_order)
    return jobs[::-1]


def _belongs(run: Run, job: Sequence[Run]) -> bool:
    if any(run.parent == each.pid or run.pid == each.pid for each in job):
        return True  # one of them has started it, or has enabled another cache
    if run.rank and any(run.rank == each.rank for each in job):
        return False  # the same job once more
    return run.job.startswith(NAMED) or any(run.parent == each.parent for each in job)


def _order(run: Run) -> tuple[bool, int, float]:
    return not run.rank.isdigit(), int(run.rank) if run.rank.isdigit() else 0, run.started


def ranks_in_words(runs: Iterable[Run]) -> str:
    """``ranks 0-7``; of processes that are no ranks their numbers."""
    runs = list(runs)
    ranks = sorted({int(run.rank) for run in runs if run.rank.isdigit()})
    others = sorted({run.rank or str(run.pid) for run in runs if not run.rank.isdigit()})
    told = []
    for what, words in (("rank", _spans(ranks)), ("process", others)):
        if words:
            is_one = len(words) == 1 and "-" not in words[0]
            plural = f"{what}es" if what == "process" else f"{what}s"
            told.append(f"{what if is_one else plural} {', '.join(words)}")
    return ", ".join(told)


def _spans(numbers: Sequence[int]) -> list[str]:
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    return ["-".join(map(str, span)) for span in spans]


@dataclass(frozen=True)
class Folded:
    """A lookup that came to the same in some processes of a job.

    Attributes:
        record: of the first of them.
        runs: the processes.
        elapsed_s: how long it took in the slowest one.
        saved_s: what all of them together were spared.
    """

    record: Record
    runs: tuple[Run, ...]
    elapsed_s: float
    saved_s: float


def folded(runs: Iterable[Run]) -> list[Folded]:
    """Each lookup of a job once, where several processes have come to the same."""
    found: dict[tuple[object, ...], list[tuple[Run, Record]]] = {}
    for run in runs:
        times: Counter[tuple[object, ...]] = Counter()
        for record in run.records:
            ended = (record.level, record.outcome, record.key, record.reason, record.where)
            messages = (reason.get("message") for reason in record.reasons)
            same = (*ended, record.rejected, *messages)
            times[same] += 1
            found.setdefault((*same, times[same]), []).append((run, record))
    return [
        Folded(
            record=each[0][1],
            runs=tuple(run for run, _ in each),
            elapsed_s=max(record.elapsed_s for _, record in each),
            saved_s=sum(record.saved_s for _, record in each),
        )
        for each in found.values()
    ]
