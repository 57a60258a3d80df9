"""Runs in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from s3cache.records import Record, Run
from s3cache.stats import Reason

__all__ = ["AS_IT_SHOULD_BE", "Kind", "Totals", "is_counted", "kind_of", "name_of", "sum_up"]

#: Reasons of misses that are nobody's fault: about these nothing is to be done.
AS_IT_SHOULD_BE = frozenset(
    map(str, (Reason.ABSENT, Reason.GUARD, Reason.DISABLED, Reason.FORCED, Reason.RANKS))
)

#: What colours tell apart.
Kind: TypeAlias = Literal["local", "remote", "miss", "bypass"]


@dataclass(frozen=True)
class Totals:
    """What some runs come to, of what :func:`is_counted`.

    Attributes:
        outcomes: how many lookups ended so, by outcome and reason; the most frequent first.
        hits, misses, bypasses: how many in all.
        spared_s: seconds that making what was hit took where it was made.
        waited_s: seconds that compiling threads waited for lookups.
        complete: whether all lookups of these runs are on record.
    """

    outcomes: Mapping[tuple[str, str], int]
    hits: int
    misses: int
    bypasses: int
    spared_s: float
    waited_s: float
    complete: bool

    @property
    def hit_rate(self) -> float | None:
        """Of the lookups, how many hit; ``None`` where nothing was looked up."""
        lookups = self.hits + self.misses
        return self.hits / lookups if lookups else None

    @property
    def codes(self) -> list[str]:
        """Of misses and bypasses the reasons about which something may be done."""
        reasons = (reason for outcome, reason in self.outcomes if outcome != "hit")
        codes = dict.fromkeys(code for reason in reasons for code in reason.split())
        return [code for code in codes if code not in AS_IT_SHOULD_BE]


def sum_up(runs: Sequence[Run]) -> Totals:
    """All of ``runs`` together."""
    records = [record for run in runs for record in run.records]
    counted = [*filter(is_counted, records)]
    ended = Counter(record.outcome for record in counted)
    return Totals(
        outcomes=dict(Counter((each.outcome, each.reason) for each in counted).most_common()),
        hits=ended["hit"],
        misses=ended["miss"],
        bypasses=ended["bypass"],
        spared_s=sum(record.saved_s for record in records),
        waited_s=sum(record.elapsed_s for record in records),
        complete=all(run.complete for run in runs),
    )


def is_counted(record: Record) -> bool:
    """Whether it is not only what came of another one.

    Where a whole graph misses, its halves are asked for, and where they miss too they have been
    told already.
    """
    return record.outcome == "hit" or not record.of_whole


def name_of(outcome: str, reason: str) -> str:
    """How a lookup ended, and where or why."""
    return f"{outcome}: {reason}" if reason else outcome


def kind_of(outcome: str, reason: str) -> Kind:
    """Which of the kinds that is: what nobody knows here is a bypass."""
    if outcome == "hit":
        return "local" if reason == "local" else "remote"
    return "miss" if outcome == "miss" else "bypass"
