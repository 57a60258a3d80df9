"""Which digest should a frame use: SHA-256 or BLAKE3?

Times both on one thread over random bytes of the sizes that matter: one kernel (64 KiB), one whole
entry (1.5 MB) and a large one (16 MiB). The two are interleaved and their order shuffled, so that
frequency changes and noisy neighbours hit both alike; the ratio is that of the medians.

    python benchmarks/digest.py [--repeats 61] [--seed 0]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import random
import statistics
import time
from collections.abc import Callable

from blake3 import blake3

SIZES = {"64 KiB": 64 << 10, "1.5 MB": 1_500_000, "16 MiB": 16 << 20}
DIGESTS: dict[str, Callable[[bytes], bytes]] = {
    "sha256": lambda data: hashlib.sha256(data).digest(),
    "blake3": lambda data: blake3(data).digest(),
}


def measure(data: bytes, repeats: int, rng: random.Random) -> dict[str, list[float]]:
    """Return the seconds of each call, per digest, after one untimed call of each."""
    names = list(DIGESTS)
    for name in names:
        DIGESTS[name](data)
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(repeats):
        rng.shuffle(names)
        for name in names:
            start = time.perf_counter()
            DIGESTS[name](data)
            times[name].append(time.perf_counter() - start)
    return times


def sha_ni() -> str:
    """Return whether the processor has SHA instructions, which decide most of the outcome."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            return "yes" if " sha_ni" in file.read() else "no"
    except OSError:
        return "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=61)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)

    print(f"{platform.machine()}, SHA-NI: {sha_ni()}, Python {platform.python_version()}")
    print(f"{'size':>8}  {'digest':>7}  {'median ms':>9}  {'p10 to p90 ms':>17}  {'GB/s':>5}")
    for label, size in SIZES.items():
        times = measure(os.urandom(size), options.repeats, rng)
        medians = {name: statistics.median(samples) for name, samples in times.items()}
        for name, samples in times.items():
            deciles = statistics.quantiles(samples, n=10)
            print(
                f"{label:>8}  {name:>7}  {medians[name] * 1e3:9.3f}  "
                f"{deciles[0] * 1e3:7.3f} to {deciles[-1] * 1e3:6.3f}  "
                f"{size / medians[name] / 1e9:5.2f}"
            )
        print(f"{label:>8}  sha256 / blake3 = {medians['sha256'] / medians['blake3']:.2f}")


if __name__ == "__main__":
    main()
