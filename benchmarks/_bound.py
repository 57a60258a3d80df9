"""Measure saves by many processes into one local directory with its maximum of files.

Run as a program, it is one of the processes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from _harness import Bar, Result, cache_without_network, key_of, percentile

from s3cache import frame
from s3cache.entries import first_name
from s3cache.settings import Settings
from s3cache.tier import DiskTier

FILES = Settings.local_max_files
P99_AT_MOST_S = 0.250
_ENTRY_BYTES = 20_000
# The mean pause between saves. A real job compiles a graph in between, which takes longer.
_PAUSE_S = 1.0


def measure(processes: int = 64, saves: int = 20) -> Result:
    result = Result(
        f"Saves by {processes} processes into one local directory at its {FILES:,} files",
        ["saves", "durable", "p50", "p99", "max", "files after"],
        notes=[
            f"{saves} saves of {_ENTRY_BYTES / 1e3:.0f} KB by each process, {_PAUSE_S:g} s apart.",
            "The directory is full at the start: it has not been trimmed.",
        ],
    )
    with tempfile.TemporaryDirectory() as root:
        tier = DiskTier(root, namespace="before", max_bytes=1 << 40, max_files=FILES)
        for number in range(FILES):
            tier.put(first_name(key_of(number)), b"x")
        tier.close()
        answers = _save_all(root, processes, saves)
        files = DiskTier(root, max_bytes=1 << 40, max_files=FILES).usage().files
    seconds = [took for answer in answers for took in answer["seconds"]]
    durable = sum(answer["durable"] for answer in answers)
    p99 = percentile(seconds, 99)
    figures = (f"{s * 1e3:.1f} ms" for s in (statistics.median(seconds), p99, max(seconds)))
    result.rows.append([str(len(seconds)), str(durable), *figures, f"{files:,}"])
    result.samples["save, s"] = seconds
    at = f"{processes} processes at the bound"
    result.bars += [
        Bar(f"durable saves, {at}", durable, "at least", processes * saves),
        Bar(f"p99 of save, {at}", p99 * 1e3, "at most", P99_AT_MOST_S * 1e3, "ms"),
        Bar(f"files, {at}", files, "at most", FILES),
    ]
    return result


def _save_all(root: str, processes: int, saves: int) -> list[dict[str, Any]]:
    command = [sys.executable, __file__, root, str(saves)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = [subprocess.Popen([*command, str(number)], **pipes) for number in range(processes)]
    for process in started:
        assert process.stdout.readline() == "ready\n"
    for process in started:
        process.stdin.write("\n")
        process.stdin.flush()
    return [json.loads(process.communicate()[0]) for process in started]


def _save(root: str, saves: int, number: int) -> None:
    cache = cache_without_network(root, "bench")
    keys = [key_of(1_000_000 + number * saves + save) for save in range(saves)]
    content = {key: {"0": os.urandom(_ENTRY_BYTES)} for key in keys}
    entries = [frame.encode(kind="bench", key=k, sections=content[k], codec="none") for k in keys]
    print("ready", flush=True)
    sys.stdin.readline()
    seconds: list[float] = []
    durable = 0
    for key, entry in zip(keys, entries, strict=True):
        time.sleep(int.from_bytes(os.urandom(2), "big") / (1 << 16) * 2 * _PAUSE_S)
        started = time.perf_counter()
        saved = cache.save(key, entry)
        seconds.append(time.perf_counter() - started)
        durable += bool(getattr(saved, "durable", False))
    print(json.dumps({"seconds": seconds, "durable": durable}), flush=True)


if __name__ == "__main__":
    _save(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    os._exit(0)  # without waiting for uploads
