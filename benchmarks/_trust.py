"""What proving who has signed costs a lookup that hits the local tier.

A signature is over a digest, which is computed anyway: what it adds does not depend on the size of
an entry. So it is measured with small ones, where it is not lost in what reading a large one varies
by, and held against a lookup of a usual one.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Sequence

from _harness import ENTRY_BYTES, Bar, Result, compiled_graph, key_of, shuffled_rounds

from s3cache import Cache, Hit, frame
from s3cache.trust import Algorithm, SigningKey, generate

SMALL_BYTES = 2_000
AT_MOST = 0.03
MORE_AT_MOST_S = 0.0003


def measure(entries: int, seed: int) -> Result:
    """Each small entry is looked up twice: an Ed25519 signature that was proven is known."""
    usual = _usual(entries, seed)
    times = _looked_up(entries, seed)
    result = Result(
        "Signed entries in the local tier",
        ["a lookup of 2 kB", "median", "more than unsigned", f"of {usual * 1e3:.2f} ms for 1.5 MB"],
        notes=[f"Medians of {entries} entries, each looked up once, and once more."],
    )
    for name, samples in times.items():
        result.samples[f"{name}, s"] = samples
        plain = times["unsigned, again" if name.endswith("again") else "unsigned"]
        more = statistics.median(a - b for a, b in zip(samples, plain, strict=True))
        cells = [f"{statistics.median(samples) * 1e3:.3f} ms"]
        if samples is not plain:
            cells += [f"{more * 1e3:.3f} ms", f"{more / usual:.1%}"]
            result.bars.append(Bar(f"{name}, over unsigned", more, "at most", MORE_AT_MOST_S, "s"))
            what = f"{name}, × a lookup of 1.5 MB"
            result.bars.append(Bar(what, more / usual, "at most", AT_MOST))
        result.rows.append([name, *cells, *[""] * (3 - len(cells))])
    return result


def _usual(repeats: int, seed: int) -> float:
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(tempfile.TemporaryDirectory())
        cache = _filled(stack, root, None, range(1), ENTRY_BYTES, seed)
        # The quickest: what else the machine does makes the share look smaller, not larger.
        return min(_timed(cache, 0) for _ in range(repeats))


def _looked_up(entries: int, seed: int) -> dict[str, Sequence[float]]:
    keys: dict[str, SigningKey | None] = {
        "unsigned": None,
        "Ed25519": generate("bench-1"),
        "HMAC-SHA256": generate("bench-2", Algorithm.HMAC_SHA256),
    }
    times: dict[str, list[float]] = {
        f"{name}{when}": [] for when in ("", ", again") for name in keys
    }
    with contextlib.ExitStack() as stack:
        # In one directory, under keys that take turns: one may be slower than another.
        root = stack.enter_context(tempfile.TemporaryDirectory())
        numbers = {
            name: range(place, len(keys) * entries, len(keys)) for place, name in enumerate(keys)
        }
        caches = {
            name: _filled(stack, root, key, numbers[name], SMALL_BYTES, seed)
            for name, key in keys.items()
        }
        for when in ("", ", again"):
            for number, names in enumerate(shuffled_rounds(list(caches), entries, seed)):
                for name in names:
                    times[name + when].append(_timed(caches[name], numbers[name][number]))
    return dict(times)


def _timed(cache: Cache, number: int) -> float:
    started = time.perf_counter()
    found = cache.lookup(key_of(number))
    elapsed = time.perf_counter() - started
    assert isinstance(found, Hit)
    return elapsed


def _filled(
    stack: contextlib.ExitStack,
    root: str,
    key: SigningKey | None,
    numbers: Sequence[int],
    size: int,
    seed: int,
) -> Cache:
    """A cache in the directory ``root``, with an entry under each of these keys."""
    signing = (
        {} if key is None else {"signing_key": key.secret_text(), "trusted_keys": key.public_text()}
    )
    cache = Cache.open(local_dir=root, strict=True, **signing)
    stack.callback(cache.close)
    sections = compiled_graph(random.Random(seed), size)
    warm_up = [10_000_000 + numbers[0] + 3 * more for more in range(5)]
    for number in (*numbers, *warm_up):
        entry = frame.encode(kind="bench", key=key_of(number), sections=sections, codec="none")
        cache.save(key_of(number), entry)
    for number in warm_up:
        cache.lookup(key_of(number))
    return cache
