"""The entry whose key is nearest to one that missed, among those that this machine knows of."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from s3cache.explaining._differences import GRAPH, Described, likeness
from s3cache.records import Record

__all__ = ["Known", "nearest"]

# Of so many that are equally near, code is compared.
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


def nearest(missed: Record, known: Iterable[Known]) -> Known | None:
    """That with the same graph, else with the most components in common, else the latest.

    Only what was there before counts.
    """
    wanted = Described(missed.components, missed.parts)
    ranked = sorted(
        (
            (likeness(each.described, wanted), bool(each.described.parts), each.time, index, each)
            for index, each in enumerate(known)
            if each.level == missed.level and each.key != missed.key and each.time < missed.time
        ),
        reverse=True,
    )
    if not ranked:
        return None
    (is_same, common), *_ = ranked[0]
    if is_same:
        return ranked[0][-1]
    # Another graph: that which is most like it, among those that are as near otherwise.
    code = _code(wanted)
    equals = [each for near, *_, each in ranked if near[1] >= common - 2][:_COMPARED]
    return max(equals, key=lambda each: _ratio(_code(each.described), code))


def _code(of: Described) -> str:
    return of.parts.get(GRAPH, {}).get("code", "")[:_COMPARED_CHARACTERS]


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one.splitlines(), other.splitlines(), False).ratio()
