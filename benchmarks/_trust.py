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
from collections.abc import Sequence

from _harness import ENTRY_BYTES, Bar, Result, compiled_graph, key_of

from s3cache import Cache, frame
from s3cache.cache import Hit
from s3cache.trust import Algorithm, SigningKey, generate

SMALL_BYTES = 2_000
MORE_AT_MOST_S = 0.0003
NOTE = "Medians of {} entries, each looked up twice, and of the differences within turns."
ROUNDS = 6
WARM_UP = 5
WARM_UP_NUMBER = 10_000_000


def measure(entries: int, seed: int) -> Result:
    """Look each entry up twice: the second lookup knows a verified Ed25519 signature."""
    result = Result(
        "Signed entries in the local tier",
        ["a lookup of", "", "median", "more than without verification"],
        notes=[NOTE.format(entries)],
    )
    for size, label in ((SMALL_BYTES, "2 kB"), (ENTRY_BYTES, "1.5 MB")):
        for algorithm, name in (
            (Algorithm.ED25519, "Ed25519"),
            (Algorithm.HMAC_SHA256, "HMAC-SHA256"),
        ):
            times = _in_rounds(entries, size, algorithm, seed)
            for when, (plain, judged) in zip(("", ", again"), times, strict=True):
                more = statistics.median(a - b for a, b in zip(judged, plain, strict=True))
                share = more / statistics.median(plain)
                what = f"{label}, {name}{when}"
                result.samples |= {f"{what}, s": judged, f"{what}, not judged, s": plain}
                result.rows.append(
                    [
                        label,
                        f"{name}{when}",
                        f"{statistics.median(judged) * 1e3:.3f} ms",
                        f"{more * 1e3:.3f} ms, {share:.1%}",
                    ]
                )
                result.bars.append(Bar(f"{what}: more", more, "at most", MORE_AT_MOST_S, "s"))
    return result


def _in_rounds(
    entries: int, size: int, algorithm: Algorithm, seed: int
) -> list[tuple[list[float], list[float]]]:
    """Return the times of all rounds. Each has new threads, as a thread keeps its core for long."""
    rounds = [
        _looked_up(entries // ROUNDS, size, algorithm, seed + number) for number in range(ROUNDS)
    ]
    return [
        (
            [took for one in rounds for took in one[when][0]],
            [took for one in rounds for took in one[when][1]],
        )
        for when in range(2)
    ]


def _looked_up(
    entries: int, size: int, algorithm: Algorithm, seed: int
) -> list[tuple[list[float], list[float]]]:
    """Look all entries up twice; return the times without and with verification.

    The two lookups of a turn take different orders, as an entry that was just read is faster.
    """
    key, draw, times = generate("bench", algorithm), random.Random(seed), []
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(tempfile.TemporaryDirectory())
        verified = _filled(stack, root, key, range(entries), size, seed)
        unverified = Cache.open(local_dir=root, strict=True)
        stack.callback(unverified.close)
        os.sync()  # the saved files must not be written to the disk during the lookups
        for _ in range(WARM_UP):
            _timed(unverified, WARM_UP_NUMBER)
            _timed(verified, WARM_UP_NUMBER)
        for _ in range(2):
            orders = [draw.sample(range(entries), entries) for _ in range(2)]
            plain, judged = [], []
            for one, other in zip(*orders, strict=True):
                if draw.random() < 0.5:
                    plain.append(_timed(unverified, one))
                    judged.append(_timed(verified, other))
                else:
                    judged.append(_timed(verified, other))
                    plain.append(_timed(unverified, one))
            times.append((plain, judged))
    return times


def _timed(cache: Cache, number: int) -> float:
    started = time.perf_counter()
    found = cache.lookup(key_of(number))
    elapsed = time.perf_counter() - started
    assert isinstance(found, Hit)
    return elapsed


def _filled(
    stack: contextlib.ExitStack,
    root: str,
    key: SigningKey,
    numbers: Sequence[int],
    size: int,
    seed: int,
) -> Cache:
    """Return a cache in the directory ``root`` with a signed entry under each of these keys."""
    cache = Cache.open(
        local_dir=root,
        strict=True,
        signing_key=key.secret_text(),
        trusted_keys=key.public_text(),
    )
    stack.callback(cache.close)
    sections = compiled_graph(random.Random(seed), size)
    for number in (*numbers, WARM_UP_NUMBER):
        entry = frame.encode(kind="bench", key=key_of(number), sections=sections, codec="none")
        cache.save(key_of(number), entry)
    return cache
