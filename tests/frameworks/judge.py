"""Whether what was found is what the catalog says: no less warm, and no warmer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tests.frameworks.catalog import Program

__all__ = ["complaints"]

ELSEWHERE = ("second", "third")


def complaints(program: Program, found: Mapping[str, Any]) -> Iterator[str]:
    """Each thing that is not as it should be, or that is better than is known."""
    if "skipped" in found:
        return
    if "failed" in found:
        yield found["failed"]
        return
    trials, known = found["trials"], program.shortfall
    first = trials["first"]
    for what, trial in trials.items():
        if trial["losses"] != first["losses"]:
            yield f"{what}: losses are {trial['losses']}, and {first['losses']} on the first"
    kept = first["saved"] + first["halves"]
    if not first["lowered"] or not (kept or known.reasons):
        yield "first: nothing is compiled, or nothing saved, so that there is nothing to see"
    if first["uploaded"] < kept:
        yield f"first: {kept} saved, {first['uploaded']} uploaded"
    if "alone again" in trials:
        again, alone = trials["first again"], trials["alone again"]
        counts = {name: (again[name], alone[name]) for name in ("lowered", "compilers")}
        if any(ours > theirs for ours, theirs in counts.values()) != known.worse:
            yield f"on the same disk, with s3cache and alone, this is not as known: {counts}"
    for what in ELSEWHERE:
        if trial := trials.get(what):
            expected = (known.lowered, known.misses, known.reasons, known.lowered > 0)
            is_so = (trial["lowered"], trial["misses"], trial["reasons"], trial["compilers"] > 0)
            if is_so != expected:
                yield f"{what}: lowered, misses, bypasses, compiled: {is_so}; known is {expected}"
