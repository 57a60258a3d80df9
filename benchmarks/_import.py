"""Measure the cost of ``import s3cache`` for a program that may never use it."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping

from _harness import Bar, Result, shuffled_rounds

AT_MOST_S = 0.050
HEAVY = ("torch", "aioboto3", "aiobotocore", "boto3", "botocore", "typer", "rich", "nacl")

_PROGRAMS = {"bare": "pass", "import": "import s3cache", "use": "from s3cache import Cache"}


def measure(repeats: int, seed: int, environment: Mapping[str, str] | None = None) -> Result:
    """Time imports in fresh processes, with ``environment`` added to this process's variables."""
    variables = {**os.environ, **(environment or {})}
    times: dict[str, list[float]] = {name: [] for name in _PROGRAMS}
    for names in shuffled_rounds(list(_PROGRAMS), repeats + 1, seed):
        for name in names:
            started = time.perf_counter()
            subprocess.run([sys.executable, "-c", _PROGRAMS[name]], env=variables, check=True)
            times[name].append(time.perf_counter() - started)
    times = {name: samples[1:] for name, samples in times.items()}  # the first round fills caches
    bare, imported, used = (statistics.median(samples) for samples in times.values())
    heavy = sorted(_heavy_modules("import s3cache", variables))
    return Result(
        "Import, in fresh processes",
        ["program", "median above a bare interpreter"],
        rows=[
            ["`import s3cache`", f"{(imported - bare) * 1e3:.1f} ms"],
            ["`from s3cache import Cache`", f"{(used - bare) * 1e3:.1f} ms"],
        ],
        notes=[f"A bare interpreter takes {bare * 1e3:.0f} ms. {repeats} runs of each."],
        bars=[
            Bar("import s3cache", (imported - bare) * 1e3, "at most", AT_MOST_S * 1e3, "ms"),
            Bar(f"heavy modules loaded by it {heavy}", len(heavy), "at most", 0),
        ],
        samples={f"{_PROGRAMS[name]}, s": samples for name, samples in times.items()},
    )


def _heavy_modules(program: str, variables: Mapping[str, str]) -> set[str]:
    show = f"{program}; import sys; print(*sys.modules)"
    child = subprocess.run(
        [sys.executable, "-c", show],
        env=variables,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return {name.partition(".")[0] for name in child.stdout.split()} & set(HEAVY)
