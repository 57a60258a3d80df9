"""Look for wrong hits: random programs, and the same with one thing changed, for some time.

    python -m tests.hits [--seconds 120] [--seed 0] [--jobs 2]

A program is compiled and saved; a changed one is looked up among what was saved, in a process
whose disk is empty. What it computes, over several calls, must be what it computes compiled with
no cache, and it must compile as many graphs on the way. Prints the smallest pair that fails, and
how many did not. The same seed draws the same programs.
"""

from __future__ import annotations

import argparse
import collections
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings

from tests.hits.sketches import Sketch, pairs
from tests.hits.trials import Bench

_AT_ONCE = 25  # drawn between two looks at the clock


def main() -> int:
    """Draw until time is up."""
    parser = argparse.ArgumentParser(prog="python -m tests.hits")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    if options.jobs > 1:
        return _side_by_side(options.jobs, options.seconds, options.seed)
    counts: collections.Counter[str] = collections.Counter()
    deadline, seed = time.monotonic() + options.seconds, options.seed
    with tempfile.TemporaryDirectory(prefix="s3cache-hits-") as root:
        bench = Bench(Path(root))
        while time.monotonic() < deadline:
            if found := _round(bench, seed, counts, deadline):
                print(f"WRONG, seed {seed}:\n{found}", flush=True)
                return 1
            seed += 1000
    print(" ".join(f"{kind} {count}" for kind, count in sorted(counts.items())), flush=True)
    return 0


def _side_by_side(jobs: int, seconds: float, seed: int) -> int:
    command = [sys.executable, "-m", "tests.hits", "--jobs=1", f"--seconds={seconds}"]
    processes = [subprocess.Popen([*command, f"--seed={seed + job}"]) for job in range(jobs)]
    return max(process.wait() for process in processes)


def _round(bench: Bench, seed: int, counts: collections.Counter[str], deadline: float) -> str:
    """Draw some pairs; the smallest wrong one, in words, or nothing."""
    wrong: list[str] = []

    @hypothesis.seed(seed)
    @settings(
        max_examples=_AT_ONCE,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )
    @given(pair=pairs())
    def is_right(pair: tuple[Sketch, Sketch]) -> None:
        if not wrong and time.monotonic() > deadline:
            return
        verdict = bench.judge(*pair)
        if not wrong:
            counts[verdict.kind] += 1
        if verdict.kind == "wrong":
            wrong.append(_told(*pair, verdict.why))
            raise AssertionError(verdict.why)

    try:
        is_right()
    except AssertionError:
        return wrong[-1]
    return ""


def _told(program: Sketch, changed: Sketch, why: str) -> str:
    parts = [
        f"{name}: {value!r} → {vars(changed)[name]!r}"
        for name, value in vars(program).items()
        if value != vars(changed)[name]
    ]
    return "\n".join(("-- saved", program.source, f"-- {program!r}", "-- changed", *parts, why))


if __name__ == "__main__":
    sys.exit(main())
