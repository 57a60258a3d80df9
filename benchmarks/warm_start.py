"""Measure how fast training starts after a compile on this machine, on another, or on none.

    make bench [ARGS="--parts first,layers --rounds 9"]
    make bench-signed

Each run is one training step of a GPT in a fresh process. Cases take turns in a shuffled order. So
the ratios hold on a busy machine, although the times do not. With an "empty disk", home, caches and
temporary directory are empty: torch's precompiled headers are gone too.

Later steps vary by a fifth from one second to the next, no matter which cache their code came from.
So two running processes take turns, a few steps each.

The part "layers" starts models of several sizes with one thread. It also measures the CPU seconds
of the process, which do not include waiting.

With ``--signed``, every entry is signed with Ed25519, and unsigned entries are refused. Only the
first steps and the import of s3cache are measured, against the same bars.

Prints tables, writes every sample as JSON and charts as SVG, and ends with status 1 if a bar is
missed. If only some parts run, the JSON keeps its results of the others, provided that they are
from a machine like this one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import _layers
import _local
from _first_step import LAYERS, WIDTH, Request
from _harness import (
    Bar,
    Gateway,
    Result,
    environment,
    finish,
    median_ratio,
    parts_of,
)
from _start import (
    COLD,
    EAGER,
    LOCAL,
    MEGA,
    MISS,
    REDIS,
    S3,
    TORCH,
    Bench,
    measure,
)
from render import horizontal_bars

from s3cache.trust import generate

PARTS = ("first", "later", "others", "layers")
FIRST = (EAGER, COLD, MISS, REDIS, MEGA, TORCH, LOCAL, S3)
BARS = (
    ("first step", "first_s", S3, REDIS, 0.08),
    ("first step", "first_s", S3, TORCH, 0.6),
    ("process start to the end of the first step", "total_s", S3, TORCH, 1.0),
    ("first step", "first_s", MISS, COLD, 1.03),
)
# In effect equal: two runs of the same code differ by as much.
LATER_LIMIT = 1.02
# Other jobs must start as fast as torch does on a machine that has compiled them.
OTHER_LIMIT = 1.0
OTHER_JOBS = {"DDP, 2 ranks": {"ranks": 2}, "24 layers": {"layers": 24}}
_STEPS_A_TURN = 5
_TURNS = 20


def measure_first(bench: Bench, options: argparse.Namespace) -> Result:
    """Measure the first step with every cache; a case without samples was not run."""
    found = measure(bench, options.only, options.rounds)
    first, total = found["first_s"], found["total_s"]
    result = Result(
        f"First training step of a GPT ({LAYERS} layers, d={WIDTH})",
        ["started from", "first step", "process start to its end"],
        notes=[
            f"Medians of {options.rounds} fresh processes each, which took turns.",
            "Loading a Mega-Cache comes before the first step, and is not in its time.",
        ],
        samples={
            f"{name}, {timed}": samples
            for timed, by_case in found.items()
            for name, samples in by_case.items()
        },
        chart="warm_start.svg",
    )
    medians = {name: statistics.median(samples) for name, samples in first.items()}
    result.svg = horizontal_bars(f"{result.title}, seconds", medians, emphasised={LOCAL, S3})
    for name in FIRST:
        cells = ["not run", "not run"]
        if name in first:
            cells = [f"{statistics.median(samples[name]):.2f} s" for samples in (first, total)]
        result.rows.append([name, *cells])
    for what, timed, above, below, limit in BARS:
        if above in first and below in first:
            ratio = median_ratio(found[timed][above], found[timed][below])
            result.bars.append(Bar(f"{what}, {above} ÷ {below}", ratio, "at most", limit))
    return result


def measure_signed(root: Path, gateway: Gateway, redis_url: str, options: Any) -> list[Result]:
    """Measure the first steps and the import, with unsigned entries refused."""
    key = generate("bench-1")
    readers = {"S3CACHE_TRUSTED_KEYS": key.public_text(), "S3CACHE_TRUST": "require"}
    signing = {**readers, "S3CACHE_SIGNING_KEY": key.secret_text()}
    request = Request(began_s=0.0)
    bench = Bench(root, gateway, redis_url, request, "signed", environment=signing)
    options.only = [name for name in FIRST if name not in (EAGER, MEGA)]
    first, imported = measure_first(bench, options), _local.measure_import(readers)
    first.rows = [row for row in first.rows if row[0] in options.only]
    first.notes.pop()  # about the Mega-Cache, which is not measured here
    first.chart = ""
    first.title += ", where every entry is signed and has to be"
    imported.title += ", where every entry has to be signed"
    return [first, imported]


def measure_later(bench: Bench, rounds: int) -> Result:
    """Measure steps after the first, in two processes that take turns."""
    names = (TORCH, S3)
    bench.prepare(names)
    found: dict[str, list[float]] = {name: [] for name in names}
    turns: dict[str, list[float]] = {name: [] for name in names}
    for number in range(1, rounds + 1):
        with bench.start(bench.cases[TORCH]()) as torch, bench.start(bench.cases[S3]()) as ours:
            both = [(TORCH, torch), (S3, ours)]
            for turn in range(_TURNS):
                for name, training in both if turn % 2 else reversed(both):
                    samples = training.steps_s(_STEPS_A_TURN)
                    found[name] += samples
                    turns[name].append(statistics.median(samples))
        print(f"later steps: round {number} done", flush=True)
    result = Result(
        "Later training steps of the same GPT",
        ["started from", "later steps"],
        notes=[
            f"Medians of {rounds} pairs of processes, which took turns of {_STEPS_A_TURN} steps.",
            "The ratio is that of consecutive turns.",
        ],
        samples=found,
    )
    for name, samples in found.items():
        result.rows.append([name, f"{1e3 * statistics.median(samples):.1f} ms"])
    ratio = median_ratio(turns[S3], turns[TORCH])
    result.bars.append(Bar(f"later steps, {S3} ÷ {TORCH}", ratio, "at most", LATER_LIMIT))
    return result


def measure_others(root: Path, gateway: Gateway, redis_url: str, options: Any) -> Result:
    """Measure first steps of other jobs, on another machine and on one with torch's own cache."""
    names = (COLD, TORCH, S3)
    result = Result(
        "First training steps of other jobs",
        ["job", *names],
        notes=[f"Medians of {options.rounds} fresh starts; with nothing cached, of one."],
    )
    for job, request in OTHER_JOBS.items():
        bench = Bench(root, gateway, redis_url, Request(began_s=0.0, **request), job)
        if request.get("ranks"):  # torch bypasses DDP's graphs, but finds their halves
            bench.cases[TORCH] = lambda case=bench.cases[TORCH]: replace(case(), hit=False)
        cold = bench.run(bench.cases[COLD]())["first_s"]
        found = measure(bench, (TORCH, S3), options.rounds)["first_s"]
        found[COLD] = [cold]
        result.samples.update({f"{job}, {name}": samples for name, samples in found.items()})
        result.rows.append([job, *(f"{statistics.median(found[name]):.2f} s" for name in names)])
        ratio = median_ratio(found[S3], found[TORCH])
        result.bars.append(Bar(f"{job}: {S3} ÷ {TORCH}", ratio, "at most", OTHER_LIMIT))
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parts_type = partial(parts_of, known=PARTS)
    parser.add_argument("--parts", type=parts_type, default=PARTS, help=f"of {','.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--signed", action="store_true", help="refuse unsigned entries")
    parser.add_argument("--json", default="docs/benchmarks/warm_start.json", help="'' for none")
    options = parser.parse_args()
    options.only = FIRST
    gateway = Gateway.from_environment()
    redis_url = os.environ.get("S3CACHE_TEST_REDIS_URL")
    if gateway is None or redis_url is None:
        raise SystemExit("no gateway or no Redis is running: use make bench")
    gateway.create_bucket()
    with tempfile.TemporaryDirectory(prefix="s3cache-bench-") as root:
        bench = Bench(Path(root), gateway, redis_url, Request(began_s=0.0))
        parts: dict[str, Callable[[], Result]] = {
            "first": lambda: measure_first(bench, options),
            "later": lambda: measure_later(bench, options.rounds),
            "others": lambda: measure_others(Path(root), gateway, redis_url, options),
            "layers": lambda: _layers.measure(Path(root), gateway, options.rounds),
        }
        if options.signed:
            results = measure_signed(Path(root), gateway, redis_url, options)
        else:
            results = [measure() for part, measure in parts.items() if part in options.parts]
    return finish(results, options.json, environment("torch", "aioboto3"))


if __name__ == "__main__":
    sys.exit(main())
