"""Measure wall-clock and CPU seconds of a start with one thread, by number of layers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from _first_step import WIDTH, Request
from _harness import Bar, Gateway, Result, median_ratio
from _start import (
    EAGER,
    PRECOMPILE,
    RECALL,
    S3,
    TORCH,
    Bench,
    Samples,
    UnexpectedStart,
    in_turns,
)
from render import lines

SIZES = (6, 24, 48)
CASES = (EAGER, TORCH, PRECOMPILE, S3, RECALL)
TITLE = f"Start of training by number of layers (GPT, d={WIDTH})"

_MAY_FAIL = (PRECOMPILE, RECALL)  # the others must work
# Limits of the ratio of CPU seconds of two starts, by number of layers.
_LIMITS = (
    (S3, TORCH, {6: 0.65, 24: 0.6}),
    (RECALL, EAGER, {6: 1.35, 48: 1.35}),
    (RECALL, PRECOMPILE, dict.fromkeys(SIZES, 1.0)),
)
_GROWTH_LIMIT_MS = 2.0


def measure(root: Path, gateway: Gateway, rounds: int) -> Result:
    """Prepare the starts of all sizes, and run them in turns."""
    kernels = root / f"layers-{SIZES[0]}" / "torch"  # layers are alike, and so are their kernels
    starts: dict[str, Callable[[], dict[str, Any]]] = {}
    missing: dict[str, str] = {}
    for size in SIZES:
        request = Request(began_s=0.0, layers=size)
        threads = {"OMP_NUM_THREADS": "1"}
        job = f"layers-{size}"
        bench = Bench(root, gateway, "", request, job, environment=threads, kernels=kernels)
        for name in CASES:
            label = _label(size, name)
            try:
                print(label, flush=True)
                bench.prepare([name])
                if name in _MAY_FAIL:
                    bench.starter(name)()
            except UnexpectedStart as reason:
                if name not in _MAY_FAIL:
                    raise
                missing[label] = str(reason)
                print(f"{label}: left out: {reason}", flush=True)
            else:
                starts[label] = bench.starter(name)
    return _result(in_turns(starts, rounds), missing)


def _result(found: Samples, missing: Mapping[str, str]) -> Result:
    """Return the table, the bars and the chart; ``missing`` is why labels have no samples."""
    result = Result(
        TITLE,
        ["started from", *(f"{size} layers" for size in SIZES), "first step, for each layer more"],
        samples={
            f"{label}, {timed}": samples
            for timed, by_label in found.items()
            for label, samples in by_label.items()
        },
        chart="start_up.svg",
    )
    for name in CASES:
        growths = _growths_ms(found, name)
        growth = f"CPU {statistics.median(growths):.1f} ms" if growths else "not run"
        cells = (_cell(found, _label(size, name)) for size in SIZES)
        result.rows.append([name, *cells, growth])
        reasons = {missing[label] for size in SIZES if (label := _label(size, name)) in missing}
        result.notes += [f"{name}: not run: {reason}." for reason in sorted(reasons)]
    rounds = len(next(iter(found["cpu_s"].values())))
    result.notes += [
        f"Medians of {rounds} fresh processes each, which took turns; one thread.",
        "From the start of the process to the end of its first step, with an optimizer.",
        "CPU seconds are those of the process itself, without its child processes.",
    ]
    result.bars += _bars(found)
    total = {
        name: {
            size: statistics.median(found["total_s"][label])
            for size in SIZES
            if (label := _label(size, name)) in found["total_s"]
        }
        for name in (EAGER, TORCH, S3, RECALL)
    }
    title = f"{TITLE}: seconds to the end of the first step"
    result.svg = lines(title, total, unit="layers", emphasised={S3, RECALL})
    return result


def _label(size: int, name: str) -> str:
    return f"{size} layers, {name}"


def _cell(found: Samples, label: str) -> str:
    if label not in found.get("cpu_s", {}):
        return "not run"
    total_s, cpu_s = (statistics.median(found[timed][label]) for timed in ("total_s", "cpu_s"))
    return f"{total_s:.2f} s, CPU {cpu_s:.2f} s"


def _growths_ms(found: Samples, name: str) -> list[float]:
    """Return CPU milliseconds of the first step per additional layer, by round; [] if not run."""
    fewest, most = min(SIZES), max(SIZES)
    first = found.get("first_cpu_s", {})
    below, above = (first.get(_label(size, name), []) for size in (fewest, most))
    if not (below and above):
        return []
    return [1e3 * (b - a) / (most - fewest) for a, b in zip(below, above, strict=True)]


def _bars(found: Samples) -> list[Bar]:
    bars = []
    for above, below, limits in _LIMITS:
        for size, limit in limits.items():
            cpu = found.get("cpu_s", {})
            ours, theirs = (cpu.get(_label(size, name)) for name in (above, below))
            ratio = median_ratio(ours, theirs) if ours and theirs else None
            bars.append(Bar(f"CPU, {size} layers: {above} ÷ {below}", ratio, "at most", limit))
    ours, theirs = (_growths_ms(found, name) for name in (RECALL, EAGER))
    growth = None
    if ours and theirs:
        growth = statistics.median(a - b for a, b in zip(ours, theirs, strict=True))
    what = f"CPU of the first step for each layer more, {RECALL} - {EAGER}"
    return [*bars, Bar(what, growth, "at most", _GROWTH_LIMIT_MS, "ms")]
