"""Measure the cost of torch's own key, and of s3cache's with all components and safety checks.

The graphs are those of one training step of a GPT, with 6 and with 24 layers. Each gets its key as
in ``torch.compile``, and is not compiled. ``first`` is the first key of a process, ``later`` the
median of its later keys. Each run is a separate process; torch's and s3cache's runs take turns. The
results are medians of all runs.

s3cache keeps torch's hash of its own source on disk. ``install`` is the time to check that this
hash is still valid. It is spent while torch is imported, and is part of ``first``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_LAYERS = (6, 24)
_LATER = 15
_BARS = {"first": 0.3, "later": 0.6}


def measure(layers: int, side: str) -> dict[str, Any]:
    """Run in one process; return milliseconds of wall clock and of this thread's CPU."""
    install = {"wall": 0.0, "cpu": 0.0}
    if side == "s3cache":
        import s3cache
        from s3cache.hooks import _session

        remember = _session.remember_installation

        def timed(*args: Any) -> None:
            began = time.perf_counter(), time.thread_time()
            remember(*args)
            install["wall"] = (time.perf_counter() - began[0]) * 1e3
            install["cpu"] = (time.thread_time() - began[1]) * 1e3

        _session.remember_installation = timed
        s3cache.enable()
    import torch
    from torch._functorch._aot_autograd import autograd_cache

    from examples._gpt import CONTEXT, GPT

    times: list[dict[str, float]] = []

    def try_load(mod: Any, args: Any, config: Any, *rest: Any, **kwargs: Any) -> Any:
        for _ in range(1 + _LATER):
            began = time.perf_counter(), time.thread_time()
            autograd_cache.autograd_cache_key(mod, args, config, *rest[:1])
            wall, cpu = time.perf_counter() - began[0], time.thread_time() - began[1]
            times.append({"wall": wall * 1e3, "cpu": cpu * 1e3})
        return (lambda inputs: mod(*inputs)), config

    autograd_cache.AOTAutogradCache.try_load = staticmethod(try_load)  # type: ignore[method-assign]
    text = torch.zeros(4, CONTEXT, dtype=torch.int64)
    torch.compile(GPT(96, layers))(text, text).backward()
    return {
        clock: {
            "install": install[clock],
            "first": install[clock] + times[0][clock],
            "later": statistics.median(each[clock] for each in times[1:]),
        }
        for clock in ("wall", "cpu")
    }


def _in_a_process(layers: int, side: str, root: str) -> dict[str, Any]:
    environment = {
        **os.environ,
        "S3CACHE_LOCAL_DIR": f"{root}/local",
        "TORCHINDUCTOR_CACHE_DIR": f"{root}/inductor",
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, "-m", "benchmarks.key_cost", "--one", str(layers), side]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        clock: {
            what: round(statistics.median(run[clock][what] for run in runs), 2)
            for what in runs[0][clock]
        }
        for clock in runs[0]
    }


def compare(rounds: int) -> dict[str, Any]:
    """Return medians of ``rounds`` processes for each size and each side, run by turns."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as root:
        _in_a_process(1, "s3cache", root)  # stores the hash of torch's source
        for layers in _LAYERS:
            runs: dict[str, list[dict[str, Any]]] = {"torch": [], "s3cache": []}
            for _ in range(rounds):
                for side, each in runs.items():
                    each.append(_in_a_process(layers, side, root))
            found[f"{layers} layers"] = {side: _medians(each) for side, each in runs.items()}
    return found


def _judged(found: dict[str, Any]) -> dict[str, Any]:
    return {
        f"{size}, {what}": {
            "ratio": round(ours / theirs, 3),
            "ratio_of_cpu_time": round(
                sides["s3cache"]["cpu"][what] / sides["torch"]["cpu"][what], 3
            ),
            "bar": bar,
            "met": ours / theirs <= bar,
        }
        for size, sides in found.items()
        for what, bar in _BARS.items()
        for ours, theirs in [(sides["s3cache"]["wall"][what], sides["torch"]["wall"][what])]
    }


def main() -> int:
    """Measure, print and write the JSON; return 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--one", nargs=2, metavar=("LAYERS", "SIDE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(int(options.one[0]), options.one[1])))
        return 0
    found = compare(options.rounds)
    judged = _judged(found)
    for size, sides in found.items():
        for side, clocks in sides.items():
            wall = "  ".join(f"{what} {ms:7.2f} ms" for what, ms in clocks["wall"].items())
            print(f"{size:10} {side:8} {wall}")
    for name, each in judged.items():
        verdict = "met" if each["met"] else "MISSED"
        print(f"{name}: {each['ratio']} of torch's, at most {each['bar']}: {verdict}")
    if options.json:
        result = {
            "unit": "ms",
            "machine": _machine(),
            "times": found,
            "bars": judged,
            "markdown": _markdown(found, judged),
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if all(each["met"] for each in judged.values()) else 1


def _markdown(found: dict[str, Any], judged: dict[str, Any]) -> str:
    """Return the section of docs/benchmarks.md."""
    lines = [
        "### What a key costs, GPT training graphs",
        "",
        "| layers, key of a process | torch | s3cache | ratio | asked |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, each in judged.items():
        size, _, what = name.partition(", ")
        torchs, ours = (found[size][side]["wall"][what] for side in ("torch", "s3cache"))
        asked = f"at most {each['bar']:g}: {'met' if each['met'] else '**missed**'}"
        lines.append(f"| {name} | {torchs:.1f} ms | {ours:.1f} ms | {each['ratio']} | {asked} |")
    lines += [
        "",
        "Medians, with safety checks and all components; measured with `make bench-keys`.",
    ]
    return "\n".join(lines)


def _machine() -> dict[str, Any]:
    from importlib.metadata import version

    return {"cpus": os.cpu_count(), "python": platform.python_version(), "torch": version("torch")}


if __name__ == "__main__":
    sys.exit(main())
