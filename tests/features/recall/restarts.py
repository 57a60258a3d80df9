"""Restart jobs again and again, as users do: no restart may disagree, or trace without need.

    python -m tests.features.recall.restarts [--restarts 500] [--jobs 2] [NAME ...]

Each restart is a new process on an empty machine with ``recall="auto"``. The jobs have what differs
between real restarts: the time, the name of a run, the process, a rank and directories. Every fifth
restart is a canary: it traces all frames and compares them.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.features.recall.programs import Program, programs_in
from tests.support import compiled
from tests.support.machines import Machine, remote_url

JOBS = programs_in(Path(__file__).with_name("restarts.txt"))
_CANARY = 5
_SETUP = """\
import time, uuid
STARTED, RUN, PROCESS = time.time(), uuid.uuid4().hex, os.getpid()
LOGS = f"/logs/{RUN}/{PROCESS}"
def steps(g, parameters, loss):
    optimizer = torch.optim.AdamW(list(parameters), lr=0.01)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        (value := loss()).backward()
        optimizer.step()
        losses.append(value.detach())
    return losses
"""


@dataclass
class Restarts:
    """What the restarts of a job did.

    Attributes:
        number: the number of restarts.
        canaries: those that traced to compare.
        recalled: frames that were recalled.
        agreed: traces with the same result as a record.
        wrong: restarts that disagreed, traced without need, or had other results.
    """

    number: int = 0
    canaries: int = 0
    recalled: int = 0
    agreed: int = 0
    wrong: list[str] = field(default_factory=list)


def start(url: str, place: str) -> dict[str, Any]:
    """Run the job of a folder in this process; return its results and what recall counted."""
    import torch

    import s3cache
    from tests.features.recall.serving import run_file

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    local = tempfile.mkdtemp()
    with s3cache.enabled(url, local_dir=local, recall="auto") as cache:
        torch.manual_seed(0)
        values = [float(each.double().sum()) for each in run_file(Path(place), torch.compile)]
        assert not cache.flush(60).remaining
        counts = {name: int(n) for name, n in cache.stats().features["recall"].items()}
        counts["misses"] = sum(cache.stats().misses.values())
        counts["hits"] = sum(cache.stats().hits.values())
        why = [each.line for each in s3cache.explain().explanations] if counts["traced"] else []
    return {"values": values, "counts": counts, "why": why}


def restart(job: Program, root: Path, number: int) -> Restarts:
    """Restart a job ``number`` times, one after the other."""
    place, done = root / "program", Restarts(number)
    place.mkdir(parents=True)
    program = place / "program.py"
    program.write_text(Program("", "", _SETUP + job.text).source("A"), encoding="utf-8")
    os.utime(program, (0, 0))  # the second rule distrusts files that are newer than the process
    first: list[float] = []
    for count in range(number):
        is_canary = count % _CANARY == _CANARY - 1
        canary = {"S3CACHE_RECALL_CANARY": "1" if is_canary else "1000000000"}
        run = f"restart-{count}"
        machine = Machine(root / run, RANK_OF_LOG=run, **canary)
        ran = machine.run(
            "tests.features.recall.restarts:start", remote_url(root), str(place), server=count
        ).result
        counts = Counter[str](ran["counts"])
        done.canaries += is_canary
        done.recalled += counts["recalled"]
        done.agreed += counts["agreed"]
        first = first or ran["values"]
        faults = {
            "other results": ran["values"] != first,
            "disagreed": counts["disagreed"],
            "not recalled": count > 1 and not is_canary and not counts["recalled"],
            "compiled": count > 0 and counts["misses"],
            "traced": count > 1 and not is_canary and _traced_in_vain(counts),
        }
        done.wrong += [
            f"{job.name}, restart {count}: {fault} {dict(counts)} {ran['why']}"
            for fault, is_so in faults.items()
            if is_so
        ]
    return done


def _traced_in_vain(counts: Counter[str]) -> bool:
    """Return whether a frame was traced that earlier processes had traced, and had kept."""
    return bool(counts["held_back"] or counts["saved"])


def restart_all(jobs: Sequence[Program], root: Path, number: int, at_once: int) -> Iterator[Any]:
    """Yield each job with what its restarts did."""
    places = [root / str(index) for index, _ in enumerate(jobs)]
    with ThreadPoolExecutor(at_once) as pool:
        yield from zip(jobs, pool.map(restart, jobs, places, [number] * len(jobs)), strict=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Restart the jobs, and print a line for each."""
    parser = argparse.ArgumentParser(prog="python -m tests.features.recall.restarts")
    parser.add_argument("words", nargs="*", help="parts of the names of jobs; by default, all jobs")
    parser.add_argument("--restarts", type=int, default=500, help="of each job (500)")
    parser.add_argument("--jobs", type=int, default=2, help="jobs at a time (2)")
    options = parser.parse_args(arguments)
    words = options.words or [""]
    jobs = [job for job in JOBS if any(word in job.name for word in words)]
    compiled.put_first()
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="s3cache-restarts-") as root:
        for job, done in restart_all(jobs, Path(root), options.restarts, options.jobs):
            print(
                f"{job.name}: {done.number} restarts, {done.canaries} canaries, {done.recalled} "
                f"frames recalled, {done.agreed} agreed, {len(done.wrong)} wrong",
                *done.wrong,
                sep="\n  ",
                flush=True,
            )
            wrong += len(done.wrong)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
