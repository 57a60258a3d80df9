"""Kill, stop, cut off or slow down processes that compile for others, at each step.

    python -m tests.fleet.run [--runs 500] [--jobs 30] [--seed 0] [--at-once 24] [--json FILE]

Each of ``--runs`` runs is a job of several processes on one node, or on several nodes that have
their own disks. In half of the runs, a killed rank is started again. At the end, a later process on
each node uploads pending entries, and a process without a disk reads all entries from the bucket.
Each of ``--jobs`` jobs is a whole job of torch, launched as torchrun does. Exits with status 1 if a
process hung or failed, or if an entry was lost or wrong.
``--only 17`` repeats one run, ``--only-job 3`` one job.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from s3cache.testing import MotoServer
from tests.fleet.jobs import Job, Outcome, Plan, Process
from tests.fleet.training import Training, draw
from tests.support import compiled

_BAD = ("hangs", "lost", "wrong", "failed")
_COUNTED = ("mishaps", "waits", "to the bound", "taken over")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fleet.run", description=__doc__)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--jobs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=24)
    parser.add_argument("--only", type=int, help="the number of one run")
    parser.add_argument("--only-job", type=int, help="the number of one job of torch")
    parser.add_argument("--json", type=Path, help="where the outcomes go")
    options = parser.parse_args()
    runs, jobs = range(options.runs), range(options.jobs)
    if options.only is not None or options.only_job is not None:
        runs, jobs = (
            range(0) if only is None else range(only, only + 1)
            for only in (options.only, options.only_job)
        )
    found = {}
    if runs:
        plans = [Plan.draw(number, options.seed) for number in runs]
        found["runs"] = _shown("runs", run(plans, options.at_once), len(plans))
    if jobs:
        found["jobs"] = _shown("jobs of torch", train(jobs, options.seed), len(jobs))
    if options.json:
        summaries = {what: summary(outcomes) for what, outcomes in found.items()}
        text = json.dumps({"seed": options.seed, **summaries}, indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")
    return int(any(outcome.bad for outcomes in found.values() for outcome in outcomes))


def run(plans: Sequence[Plan], at_once: int = 24) -> Iterator[Outcome]:
    """Carry out plans, ``at_once`` at a time, and yield their outcomes in order."""
    wires = any(plan.wire for plan in plans)
    Process.prepare(*(["aioboto3"] if wires else []))
    with (
        tempfile.TemporaryDirectory(prefix="s3c-fleet-") as root,
        MotoServer() if wires else nullcontext() as moto,
        ThreadPoolExecutor(at_once) as pool,
    ):

        def carry_out(plan: Plan) -> Outcome:
            place = Path(root, str(plan.number))
            try:
                return Job(plan, place, moto).run()
            finally:
                shutil.rmtree(place)

        yield from pool.map(carry_out, plans)


def train(numbers: Iterable[int], seed: int) -> Iterator[Outcome]:
    """Run jobs of torch, one after the other."""
    compiled.put_first()
    with (
        tempfile.TemporaryDirectory(prefix="s3c-fleet-") as root,
        Training(Path(root)) as training,
    ):
        for number in numbers:
            yield training.run(draw(number, seed))


def _shown(what: str, outcomes: Iterable[Outcome], count: int) -> list[Outcome]:
    began, found = time.monotonic(), list[Outcome]()
    for outcome in outcomes:
        found.append(outcome)
        for each in outcome.bad:
            print(f"BAD: {what}, {outcome.number}, {outcome.kind}: {each}", flush=True)
        if len(found) % 50 == 0:
            print(f"{len(found)} of {count} {what}", file=sys.stderr, flush=True)
    print(f"{table(found)}\n\n{count} {what}, {time.monotonic() - began:.0f} s\n", flush=True)
    return found


def _rows(outcomes: Iterable[Outcome]) -> dict[tuple[str, str, str], Counter[str]]:
    rows: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for outcome in outcomes:
        row = rows[outcome.kind]
        row["runs"] += 1
        row.update(outcome.counts)
        for what in _BAD:
            row[what] += bool(getattr(outcome, what))
    return rows


def table(outcomes: Iterable[Outcome]) -> str:
    """Return a row for each step, mishap and place."""
    columns, total = ("runs", *_BAD, *_COUNTED), Counter[str]()
    lines = ["| step | mishap | where | " + " | ".join(columns) + " |", "|---" * 12 + "|"]
    for kind, row in sorted(_rows(outcomes).items()):
        lines.append(f"| {' | '.join(kind)} | " + " | ".join(str(row[c]) for c in columns) + " |")
        total.update(row)
    lines.append("| **all** | | | " + " | ".join(f"**{total[c]}**" for c in columns) + " |")
    return "\n".join(lines)


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the rows of the table, the longest wait, and the failures."""
    rows = sorted(_rows(outcomes).items())
    return {
        "runs": len(outcomes),
        "longest wait beyond wait_s": round(max(each.longest_s for each in outcomes), 2),
        "rows": [
            {"step": step, "mishap": mishap, "where": where, **row}
            for (step, mishap, where), row in rows
        ],
        "bad": {outcome.number: outcome.bad for outcome in outcomes if outcome.bad},
    }


if __name__ == "__main__":
    sys.exit(main())
