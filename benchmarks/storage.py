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

import _bound
import _import
import _lookup
import _memory
import _save
import _trust
import render
from _harness import Gateway, Result, all_met, environment, parts_of, write_results

# Lookups come late: ext4 without a journal creates files slowly after 100,000 were removed.
PARTS = ("import", "save", "throughput", "memory", "trust", "lookup", "bound")
NEED_GATEWAY = ("throughput", "memory")


def main() -> int:
    options = _options()
    gateway = Gateway.from_environment()
    if gateway is not None:
        gateway.create_bucket()

    results: list[Result] = []
    for part in options.parts:
        if part in NEED_GATEWAY and gateway is None:
            print(f"{part}: skipped, as there is no gateway\n")
            continue
        results.append(_measure(part, gateway, options))
        print(results[-1].markdown(), flush=True)

    print(*(bar for result in results for bar in result.bars), sep="\n")
    if options.json:
        packages = ("aioboto3", "aiohttp", "botocore", "obstore")
        write_results(options.json, environment(*packages), results)
        render.fill_page("storage", options.json, "make bench-storage", parts=len(PARTS))
    return int(not all_met(results))


def _measure(part: str, gateway: Gateway | None, options: argparse.Namespace) -> Result:
    measure: dict[str, Callable[[], Result]] = {
        "bound": lambda: _bound.measure(options.processes, options.saves_each),
        "import": lambda: _import.measure(options.imports, options.seed),
        "lookup": lambda: _lookup.measure(options.lookups, options.entries, options.seed),
        "save": lambda: _save.measure(gateway, options.saves, options.seed),
        "trust": lambda: _trust.measure(options.signed, options.seed),
    }
    if gateway is not None:
        measure["memory"] = lambda: _memory.measure(gateway, options.memory_bytes, options.seed)
        measure["throughput"] = lambda: _throughput(gateway, options)
    return measure[part]()


def _throughput(gateway: Gateway, options: argparse.Namespace) -> Result:
    import _throughput as throughput  # needs aioboto3 and obstore, the other parts do not

    return throughput.measure(gateway, options.rounds, options.seed)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--parts",
        type=partial(parts_of, known=PARTS),
        default=PARTS,
        help=f"parts to run, of {','.join(PARTS)}",
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each throughput")
    parser.add_argument("--lookups", type=int, default=501)
    parser.add_argument(
        "--entries", type=int, default=100_000, help="entries in the larger local tier"
    )
    parser.add_argument("--saves", type=int, default=300, help="saves of each kind and condition")
    parser.add_argument("--signed", type=int, default=300, help="signed entries of each kind")
    parser.add_argument(
        "--processes", type=int, default=64, help="processes that save at the bound"
    )
    parser.add_argument(
        "--saves-each", type=int, default=20, help="saves of each process at the bound"
    )
    parser.add_argument("--imports", type=int, default=15)
    parser.add_argument("--memory-bytes", type=int, default=2 << 30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--json", default="build/benchmarks/storage.json", help="file for the results; '' for none"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
