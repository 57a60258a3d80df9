"""Assert that a program starts warm on a machine that never ran it."""

from __future__ import annotations

from collections.abc import Callable
from difflib import unified_diff
from pprint import pformat

from s3cache.stats import CacheStats
from s3cache.testing.machines import Outcome
from s3cache.util.words import counted

__all__ = ["assert_warm_start"]

# torch then asks no cache for the graph, at either level.
_NEVER_ASKED = ("caches-off", "fx-graph-cache-off")
_DIFFERENCES_AT_MOST = 20


def output_of(outcome: Outcome) -> object:
    """Return what the program printed, and what the function returned if one was called."""
    return outcome.stdout if outcome.result is None else (outcome.stdout, outcome.result)


def assert_warm_start(
    first: Outcome,
    second: Outcome,
    *,
    same: Callable[[Outcome], object] = output_of,
) -> None:
    """Assert that ``second`` compiled nothing, and gave the same as ``first``.

    A graph is compiled if neither level of the cache has it. Whole graphs may miss: a forward that
    no backward ever followed is found at the second level, and what is found there is not compiled.

    Only the process that the machine started counts, not those that it started itself.

    Args:
        first: what the program came to on one machine.
        second: what it came to on another one, or on the same one later.
        same: returns the part of an outcome that must be equal; for a program that prints times or
            paths, leave those out here.

    Raises:
        AssertionError: it compiled something, hit nothing, or gave something else.
    """
    stats = second.stats
    if compiled := _compiled(first.stats, stats):
        words = "\n  ".join(compiled)
        raise AssertionError(f"{second.command}: compiled on the second machine:\n  {words}")
    if not (sum(stats.hits.values()) + sum(stats.fx.hits.values())):
        raise AssertionError(
            f"{second.command}: hit nothing, so it compiled nothing; does it call a function of "
            "torch.compile, with a backend that caches, while s3cache is on?"
        )
    expected, got = same(first), same(second)
    if expected != got:
        raise AssertionError(
            f"{second.command}: started warm, and gave something else than on the first machine; "
            f"give 'same' if it must (times, paths):\n{_difference(expected, got)}"
        )


def _compiled(first: CacheStats, second: CacheStats) -> list[str]:
    """Return what the second machine compiled, with what may explain it; empty if nothing."""
    level = second.fx
    found = [
        f"{counted(count, 'graph')} with torch's caches off ({code})"
        for code, count in second.bypass_reasons.items()
        if code in _NEVER_ASKED
    ]
    for reason, count in level.misses.items():
        if count:
            found.append(f"{counted(count, 'half', 'halves')} of a graph missed ({reason})")
    if level.bypassed:
        codes = ", ".join(level.bypass_reasons)
        found.append(f"{counted(level.bypassed, 'half', 'halves')} cannot be cached ({codes})")
    if not found:
        return []
    misses = ", ".join(f"{count} {reason}" for reason, count in second.misses.items() if count)
    if misses:
        found.append(f"whole graphs that missed: {misses}; `s3cache explain` says why")
    if second.bypassed:
        codes = ", ".join(second.bypass_reasons)
        found.append(f"whole graphs that cannot be cached: {second.bypassed} ({codes})")
    if first.pending:
        found.append(f"the first machine had {counted(first.pending, 'upload')} still to do")
    return found


def _difference(expected: object, got: object) -> str:
    old, new = (
        (each if isinstance(each, str) else pformat(each)).splitlines() for each in (expected, got)
    )
    lines = list(unified_diff(old, new, "first", "second", n=1))
    return "\n".join(line.rstrip("\n") for line in lines[:_DIFFERENCES_AT_MOST])
