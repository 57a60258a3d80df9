"""Measure speed and memory of the storage engine, and compare them with their bars.

    make bench-storage [ARGS="--parts throughput,save --rounds 9"]

Contenders take turns in a shuffled order, in one process or one after the other. So the ratios hold
on a busy machine, although the times do not. Prints tables, writes every sample as JSON below
build/, and ends with status 1 if a bar is missed. Without a gateway (see infra/README.md), the
parts that need one are skipped. If only some parts run, the JSON keeps its results of the others,
provided that they are from a machine like this one. When it has all parts, they go into
docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import _bound
import _local
import _memory
import _save
import render
from _harness import Gateway, Result, all_met, environment, parts_of, write_results

# Lookups come late: ext4 without a journal creates files slowly after 100,000 were removed.
PARTS = ("import", "save", "throughput", "memory", "trust", "lookup", "bound")
NEED_GATEWAY = ("throughput", "memory")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parts = partial(parts_of, known=PARTS)
    parser.add_argument("--parts", type=parts, default=PARTS, help=f"of {','.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each throughput")
    parser.add_argument("--json", default="build/benchmarks/storage.json", help="'' for none")
    options = parser.parse_args()
    gateway = Gateway.from_environment()
    if gateway is not None:
        gateway.create_bucket()

    results: list[Result] = []
    for part in options.parts:
        if part in NEED_GATEWAY and gateway is None:
            print(f"{part}: skipped, as there is no gateway\n")
            continue
        results.append(_measure(part, gateway, options.rounds))
        print(results[-1].markdown(), flush=True)

    if options.json:
        packages = ("aioboto3", "aiohttp", "botocore", "obstore")
        write_results(options.json, environment(*packages), results)
        render.fill_page("storage", Path(options.json), "make bench-storage", parts=len(PARTS))
    return int(not all_met(results))


def _measure(part: str, gateway: Gateway | None, rounds: int) -> Result:
    measures: dict[str, Callable[[], Result]] = {
        "bound": _bound.measure,
        "import": _local.measure_import,
        "lookup": _local.measure_lookup,
        "save": lambda: _save.measure(gateway),
        "trust": _local.measure_trust,
    }
    if gateway is not None:
        measures["memory"] = lambda: _memory.measure(gateway)
        measures["throughput"] = lambda: _throughput(gateway, rounds)
    return measures[part]()


def _throughput(gateway: Gateway, rounds: int) -> Result:
    import _throughput as throughput  # needs aioboto3 and obstore, the other parts do not

    return throughput.measure(gateway, rounds)


if __name__ == "__main__":
    sys.exit(main())
