"""Compare a lookup that hits the local tier with reading and hashing the same file."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import statistics
import tempfile
from collections.abc import Callable

from _harness import ENTRY_BYTES, Bar, Result, compiled_graph, in_turns, key_of, median_ratio

from s3cache import Cache, frame

FEW = 100
READ_AT_MOST = 1.3
MANY_AT_MOST = 1.2


def measure(repeats: int = 501, many: int = 100_000) -> Result:
    with contextlib.ExitStack() as stack:

        def filled_cache(count: int) -> Cache:
            root = stack.enter_context(tempfile.TemporaryDirectory())
            cache = Cache.open(local_dir=root, local_max_files=2 * many, strict=True)
            stack.callback(cache.close)
            return _fill(cache, count)

        small, large = filled_cache(FEW), filled_cache(many)
        path = _largest_file(small.settings.local_dir)

        def read_and_hash() -> None:
            with open(path, "rb") as file:
                hashlib.sha256(file.read()).digest()

        calls: dict[str, Callable[[], object]] = {
            "read and SHA-256": read_and_hash,
            f"lookup among {FEW:,}": lambda: small.lookup(key_of(0)),
            f"lookup among {many:,}": lambda: large.lookup(key_of(0)),
        }
        times = in_turns(calls, repeats)
        for cache in (small, large):
            assert cache.stats().hits["local"] == repeats
    return _result(times)


def _fill(cache: Cache, count: int) -> Cache:
    """Save an entry of the usual size under the first key, and tiny ones under the others."""
    sections = compiled_graph(random.Random(0), ENTRY_BYTES)
    usual = frame.encode(kind="bench", key=key_of(0), sections=sections, codec="none")
    cache.save(key_of(0), usual)
    for key in map(key_of, range(1, count)):
        cache.save(key, frame.encode(kind="bench", key=key, sections={"0": b"small"}))
    return cache


def _largest_file(root: str) -> str:
    files = (os.path.join(path, name) for path, _, names in os.walk(root) for name in names)
    return max(files, key=os.path.getsize)


def _result(times: dict[str, list[float]]) -> Result:
    read, small, large = times.values()
    names = list(times)
    over_read, over_few = median_ratio(small, read), median_ratio(large, small)
    result = Result(
        f"Lookup of {ENTRY_BYTES / 1e6:.1f} MB in the local tier",
        ["", "median", "p99", "ratio"],
        samples={f"{name}, s": samples for name, samples in times.items()},
        bars=[
            Bar(f"{names[1]}, × {names[0]}", over_read, "at most", READ_AT_MOST),
            Bar(f"{names[2]}, × {names[1]}", over_few, "at most", MANY_AT_MOST),
        ],
    )
    ratios = ["1", f"{over_read:.2f} × the read", f"{over_few:.2f} × among {FEW}"]
    for (name, samples), ratio in zip(times.items(), ratios, strict=True):
        p99 = statistics.quantiles(samples, n=100)[98]
        row = [name, f"{statistics.median(samples) * 1e3:.2f} ms", f"{p99 * 1e3:.2f} ms", ratio]
        result.rows.append(row)
    return result
