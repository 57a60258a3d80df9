"""Read what processes of this machine have recorded, and group them by job."""

from __future__ import annotations

import base64
import json
import os
import stat
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from s3cache.records._record import DIRECTORY, NAMED, SUFFIX, Event, Record, Run
from s3cache.store import Directory

# Opening a pipe must not block.
_READ_ONLY = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_BYTES = 16 << 20
_MAX_PARTS_BYTES = 16 << 20
_HEAD_BYTES = 16 << 10
_BAD = (AttributeError, KeyError, RecursionError, TypeError, ValueError, zlib.error)


def run_names(root: str) -> list[str]:
    """Return the names of all runs that are recorded in a local tier, the latest first.

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
    """Return a run, as far as it is written; damaged or unfinished lines are left out.

    Raises:
        ConfigError: the directory may be another user's work.
        OSError: there is none of that name, or it cannot be read.
    """
    return _read(root, name, _MAX_BYTES)


def read_head(root: str, name: str) -> Run:
    """Return a run without its lookups: cheap.

    Raises:
        ConfigError, OSError: as :func:`read_run`.
    """
    return _read(root, name, _HEAD_BYTES, with_lookups=False)


def _read(root: str, name: str, max_bytes: int, *, with_lookups: bool = True) -> Run:
    directory = Directory.at(root).enter(DIRECTORY)
    fd = os.open(f"{name}{SUFFIX}", _READ_ONLY, dir_fd=directory.fd)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise PermissionError(f"{name} is not a file of ours")
        lines = file.read(max_bytes).split(b"\n")
    head: dict[str, Any] = {}
    records: list[Record] = []
    events: list[Event] = []
    breaks: list[dict[str, str]] = []
    for line in lines:
        try:
            value = json.loads(line)
            if "outcome" in value:
                if with_lookups:
                    records.append(Record.from_dict(_unpacked(value)))
            elif "event" in value:
                if with_lookups:
                    events.append(Event.from_dict(value))
            elif "graph_break" in value:
                place = value["graph_break"]
                breaks.append({"reason": str(place["reason"]), "where": str(place["where"])})
            else:
                head.update(value)
        except _BAD:
            continue
    head["noted"] = head.get("at")
    head["complete"] = "more" not in head
    about = {
        each.name: head[each.name]
        for each in fields(Run)
        if isinstance(each.default, (str, int, float))
        and isinstance(head.get(each.name), type(each.default))
    }
    return Run(
        **{**about, "name": name},
        records=tuple(records),
        events=tuple(events),
        breaks=tuple(breaks),
    )


def _unpacked(record: dict[str, Any]) -> dict[str, Any]:
    if parts := record.get("parts"):
        plain = zlib.decompressobj().decompress(base64.b85decode(parts), _MAX_PARTS_BYTES)
        record["parts"] = json.loads(plain)
    return record


# -- jobs: the ranks that a launcher has started, and the processes that they start


def in_jobs(runs: Iterable[Run]) -> list[list[Run]]:
    """Return the runs by job, the job that began last first; in a job by rank.

    A run that belongs to no job is one by itself.
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
        job.sort(key=lambda run: (not run.rank.isdigit(), _number(run.rank), run.started))
    return jobs[::-1]


def _belongs(run: Run, job: Sequence[Run]) -> bool:
    if any(run.parent == each.pid or run.pid == each.pid for each in job):
        return True  # one of them has started it, or has enabled another cache
    if run.rank and any(run.rank == each.rank for each in job):
        return False  # the same job once more
    return run.job.startswith(NAMED) or any(run.parent == each.parent for each in job)


def _number(rank: str) -> int:
    return int(rank) if rank.isdigit() else 0


def ranks_in_words(runs: Iterable[Run]) -> str:
    """Return ``ranks 0-7``; processes without a rank are given by their process ids."""
    runs = list(runs)
    spans: list[list[int]] = []
    for number in sorted({int(run.rank) for run in runs if run.rank.isdigit()}):
        if spans and number == spans[-1][-1] + 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    ranks = ["-".join(map(str, span)) for span in spans]
    others = sorted({run.rank or str(run.pid) for run in runs if not run.rank.isdigit()})
    words = []
    for one, many, shown in (("rank", "ranks", ranks), ("process", "processes", others)):
        if shown:
            is_one = len(shown) == 1 and "-" not in shown[0]
            words.append(f"{one if is_one else many} {', '.join(shown)}")
    return ", ".join(words)


@dataclass(frozen=True)
class Folded:
    """A lookup that ended the same way in some processes of a job.

    Attributes:
        record: of the first of them.
        runs: the processes.
        elapsed_s: how long it took in the slowest one.
        saved_s: the compile time that all of them together were spared.
    """

    record: Record
    runs: tuple[Run, ...]
    elapsed_s: float
    saved_s: float


def folded(runs: Iterable[Run]) -> list[Folded]:
    """Return each lookup of a job once, where it ended the same way in several processes."""
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
