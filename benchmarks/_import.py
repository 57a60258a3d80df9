"""Measure the cost of ``import s3cache`` for a program that may never use it."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping

from _harness import Bar, Result, in_turns

AT_MOST_S = 0.050
HEAVY = ("torch", "aioboto3", "aiobotocore", "boto3", "botocore", "typer", "rich", "nacl")

_PROGRAMS = {"bare": "pass", "import": "import s3cache", "use": "from s3cache import Cache"}


def measure(environment: Mapping[str, str] | None = None, repeats: int = 15) -> Result:
    """Time imports in fresh processes, with ``environment`` added to this process's variables."""
    variables = {**os.environ, **(environment or {})}

    def running(program: str) -> Callable[[], object]:
        return lambda: subprocess.run([sys.executable, "-c", program], env=variables, check=True)

    programs = {name: running(program) for name, program in _PROGRAMS.items()}
    times = in_turns(programs, repeats + 1)
    times = {name: samples[1:] for name, samples in times.items()}  # the first round fills caches
    bare, imported, used = (statistics.median(samples) for samples in times.values())
    shows = [sys.executable, "-c", "import s3cache, sys; print(*sys.modules)"]
    run = subprocess.run(shows, env=variables, stdout=subprocess.PIPE, check=True, text=True)
    loaded = run.stdout.split()
    heavy = sorted({name.partition(".")[0] for name in loaded} & set(HEAVY))
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
