"""Measure the cost of verifying signatures for a lookup that hits the local tier.

The cost does not depend on the size: a signature covers a digest, which is computed anyway.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import tempfile
import time
from typing import TypeAlias

from _harness import ENTRY_BYTES, Bar, Result, compiled_graph, key_of

from s3cache import Cache, frame
from s3cache.cache import Hit
from s3cache.trust import Algorithm, generate

SIZES = {"2 kB": 2_000, "1.5 MB": ENTRY_BYTES}
ALGORITHMS = {"Ed25519": Algorithm.ED25519, "HMAC-SHA256": Algorithm.HMAC_SHA256}
MORE_AT_MOST_S = 0.0003
ROUNDS = 6  # each has new threads, as a thread keeps its core for long
WARM_UP = 5
WARM_UP_NUMBER = 10_000_000

#: Seconds without and with verification; of the first lookup of an entry, and of the second.
_Times: TypeAlias = "list[tuple[list[float], list[float]]]"


def measure(entries: int = 300) -> Result:
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
