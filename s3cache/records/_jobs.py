"""Which processes are one job: the ranks that a launcher has started, and what they start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from s3cache.records._reading import Run
from s3cache.records._record import Record
from s3cache.records._writing import NAMED

__all__ = ["Folded", "folded", "in_jobs", "ranks_in_words"]


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
