"""Measure what needs no server: imports, lookups in the local tier, and signatures.

The cost of signatures does not depend on the size: they cover a digest, which is computed anyway.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import TypeAlias

from _harness import ENTRY_BYTES, Bar, Result, compiled_graph, in_turns, key_of, median_ratio

from s3cache import Cache, frame
from s3cache.cache import Hit
from s3cache.trust import Algorithm, generate

AT_MOST_S = 0.050
HEAVY = ("torch", "aioboto3", "aiobotocore", "boto3", "botocore", "typer", "rich", "nacl")

_PROGRAMS = {"bare": "pass", "import": "import s3cache", "use": "from s3cache import Cache"}


def measure_import(environment: Mapping[str, str] | None = None, repeats: int = 15) -> Result:
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


FEW = 100
READ_AT_MOST = 1.3
MANY_AT_MOST = 1.2


def measure_lookup(repeats: int = 501, many: int = 100_000) -> Result:
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


SIZES = {"2 kB": 2_000, "1.5 MB": ENTRY_BYTES}
ALGORITHMS = {"Ed25519": Algorithm.ED25519, "HMAC-SHA256": Algorithm.HMAC_SHA256}
MORE_AT_MOST_S = 0.0003
ROUNDS = 6  # each has new threads, as a thread keeps its core for long
WARM_UP = 5
WARM_UP_NUMBER = 10_000_000

#: Seconds without and with verification; of the first lookup of an entry, and of the second.
_Times: TypeAlias = "list[tuple[list[float], list[float]]]"


def measure_trust(entries: int = 300) -> Result:
    """Look each entry up twice: the second lookup knows a verified Ed25519 signature."""
    result = Result(
        "Signed entries in the local tier",
        ["a lookup of", "", "median", "more than without verification"],
        notes=[f"Medians of {entries} entries, each looked up twice; of differences within turns."],
    )
    for label, size in SIZES.items():
        for name, algorithm in ALGORITHMS.items():
            times: _Times = [([], []), ([], [])]
            for number in range(ROUNDS):
                _look_up(times, entries // ROUNDS, size, algorithm, number)
            for when, (plain, judged) in zip(("", ", again"), times, strict=True):
                more = statistics.median(a - b for a, b in zip(judged, plain, strict=True))
                share = more / statistics.median(plain)
                what, took = f"{label}, {name}{when}", statistics.median(judged) * 1e3
                result.samples |= {f"{what}, s": judged, f"{what}, not judged, s": plain}
                cells = f"{took:.3f} ms", f"{more * 1e3:.3f} ms, {share:.1%}"
                result.rows.append([label, f"{name}{when}", *cells])
                result.bars.append(Bar(f"{what}: more", more, "at most", MORE_AT_MOST_S, "s"))
    return result


def _look_up(times: _Times, entries: int, size: int, algorithm: Algorithm, seed: int) -> None:
    """Look all entries up twice, and add the times.

    The two lookups of a turn take different orders, as an entry that was just read is faster.
    """
    key, draw = generate("bench", algorithm), random.Random(seed)
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(tempfile.TemporaryDirectory())
        keys = {"signing_key": key.secret_text(), "trusted_keys": key.public_text()}
        verified = stack.enter_context(Cache.open(local_dir=root, strict=True, **keys))
        sections = compiled_graph(random.Random(seed), size)
        for number in (*range(entries), WARM_UP_NUMBER):
            entry = frame.encode(kind="bench", key=key_of(number), sections=sections, codec="none")
            verified.save(key_of(number), entry)
        unverified = stack.enter_context(Cache.open(local_dir=root, strict=True))
        os.sync()  # the saved files must not be written to the disk during the lookups
        for _ in range(WARM_UP):
            _timed(unverified, WARM_UP_NUMBER)
            _timed(verified, WARM_UP_NUMBER)
        for plain, judged in times:
            orders = [draw.sample(range(entries), entries) for _ in range(2)]
            for one, other in zip(*orders, strict=True):
                turns = [(unverified, one, plain), (verified, other, judged)]
                for cache, number, into in draw.sample(turns, 2):
                    into.append(_timed(cache, number))


def _timed(cache: Cache, number: int) -> float:
    started = time.perf_counter()
    found = cache.lookup(key_of(number))
    elapsed = time.perf_counter() - started
    assert isinstance(found, Hit)
    return elapsed
