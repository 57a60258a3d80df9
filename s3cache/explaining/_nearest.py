"""The entry whose key is nearest to one that missed, among those that this machine knows of."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from s3cache.explaining._differences import GRAPH, Described, likeness, unlikeness
from s3cache.records import Record

__all__ = ["Known", "nearest"]

# Of so many that are equally near, the latest ones, parts and code are compared.
_COMPARED = 16
_COMPARED_CHARACTERS = 20_000


@dataclass(frozen=True)
class Known:
    """An entry that this machine has looked up, or has.

    Attributes:
        where: it is known from, in words.
        time: Unix time since when.
    """

    key: str
    level: str
    described: Described
    where: str
    time: float


def nearest(
    missed: Record, known: Iterable[Known], complete: Callable[[Known], Known]
) -> Known | None:
    """That with the same graph, else with the most components in common.

    Of several it is the one whose other components differ in the fewest of their parts, else the
    latest. Only what was there before counts.

    Args:
        complete: gives what is known with the parts that are not at hand.
    """
    wanted = Described(missed.components, missed.parts)
    ranked = sorted(
        (
            (likeness(each.described, wanted), each.time, index, each)
            for index, each in enumerate(known)
            if each.level == missed.level and each.key != missed.key and each.time < missed.time
        ),
        reverse=True,
    )
    if not ranked:
        return None
    (is_same, common), *_ = ranked[0]
    # Of another graph parts cannot say as much as its code: one that is as near otherwise counts.
    least = common if is_same else common - 2
    equals = [each for near, *_, each in ranked if near >= (is_same, least)][:_COMPARED]
    code = "" if is_same else _code(wanted)

    def nearness(each: Known) -> tuple[object, ...]:
        alike = 0.0 if is_same else _ratio(_code(each.described), code)
        is_unknown, count = unlikeness(each.described, wanted)
        return alike, likeness(each.described, wanted), not is_unknown, -count, each.time

    return max(map(complete, equals), key=nearness)


def _code(of: Described) -> str:
    return of.parts.get(GRAPH, {}).get("code", "")[:_COMPARED_CHARACTERS]


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one.splitlines(), other.splitlines(), False).ratio()
