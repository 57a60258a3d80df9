"""Kill, stop, cut off or slow down processes that compile for others, at each step.

    python -m tests.fleet.run [--runs 500] [--jobs 30] [--seed 0] [--at-once 24]

Each of ``--runs`` runs is a job of several processes on one node, or on several nodes that have
their own disks. In half of the runs, a killed rank is started again. At the end, a later process on
each node uploads pending entries, and a process without a disk reads all entries from the bucket.
Each of ``--jobs`` jobs is a whole job of torch, launched as torchrun does. Exits with status 1 if a
process hung or failed, or if an entry was lost or wrong.
``--only 17`` repeats one run, or one job with ``--runs 0``.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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
    parser.add_argument("--only", type=int, help="the number of one run, or of one job")
    options = parser.parse_args()
    runs, jobs = range(options.runs), range(options.jobs)
    if options.only is not None:
        one = range(options.only, options.only + 1)
        runs, jobs = (one, range(0)) if runs else (runs, one)
    outcomes = list[Outcome]()
    if runs:
        plans = [Plan.draw(number, options.seed) for number in runs]
        outcomes += _shown("runs", run(plans, options.at_once), len(plans))
    if jobs:
        outcomes += _shown("jobs of torch", train(jobs, options.seed), len(jobs))
    return int(any(outcome.bad for outcome in outcomes))


def run(plans: Sequence[Plan], at_once: int = 24) -> Iterator[Outcome]:
    """Carry out plans, ``at_once`` at a time, and yield their outcomes in order."""
    Process.prepare()
    with (
        tempfile.TemporaryDirectory(prefix="s3c-fleet-") as root,
        ThreadPoolExecutor(at_once) as pool,
    ):

        def carry_out(plan: Plan) -> Outcome:
            place = Path(root, str(plan.number))
            try:
                return Job(plan, place).run()
            finally:
                shutil.rmtree(place)

        yield from pool.map(carry_out, plans)


def train(numbers: Iterable[int], seed: int) -> Iterator[Outcome]:
    """Run jobs of torch, one after the other."""
    compiled.put_first()
    with tempfile.TemporaryDirectory(prefix="s3c-fleet-") as root:
        training = Training(Path(root))
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


def table(outcomes: Iterable[Outcome]) -> str:
    """Return a row for each step, mishap and place."""
    rows: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for outcome in outcomes:
        failures = {what: int(bool(getattr(outcome, what))) for what in _BAD}
        for kind in (outcome.kind, ("all", "", "")):
            rows[kind].update({"runs": 1, **outcome.counts, **failures})
    columns = ("runs", *_BAD, *_COUNTED)
    lines = ["| step | mishap | where | " + " | ".join(columns) + " |", "|---" * 12 + "|"]
    for kind, row in sorted(rows.items()):
        lines.append(f"| {' | '.join(kind)} | " + " | ".join(str(row[c]) for c in columns) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
