"""Sum up runs: as numbers, as the keys that they used, and as a trace."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from s3cache._words import counted
from s3cache.records import Event, Lanes, Record, Run
from s3cache.stats import Reason

__all__ = [
    "AS_IT_SHOULD_BE",
    "Kind",
    "Totals",
    "is_counted",
    "kind_of",
    "manifest",
    "name_of",
    "sum_up",
    "trace",
]

#: Reasons of misses that need no action.
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
    lookups = [*filter(is_counted, records)]
    ended = Counter(record.outcome for record in lookups)
    return Totals(
        outcomes=dict(Counter((each.outcome, each.reason) for each in lookups).most_common()),
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
    """Which of the kinds that is: an unknown one is a bypass."""
    if outcome == "hit":
        return "local" if reason == "local" else "remote"
    return "miss" if outcome == "miss" else "bypass"


# -- keys to copy to where the same is to run


def manifest(runs: Sequence[Run]) -> str:
    """The keys that ``runs`` hit, and those that they saved something under, one to a line.

    It leaves out misses that were not saved, and shape profiles, which are not recorded.
    """
    keys = dict.fromkeys(
        each.key for run in runs for each in run.records if each.outcome == "hit" and each.key
    )
    keys.update(
        dict.fromkeys(each.name for run in runs for each in run.events if each.event == "save")
    )
    lines = [f"# {counted(len(keys), 'key')} that {' '.join(run.name for run in runs)} used"]
    if not all(run.complete for run in runs):
        lines.append("# there were more, of which there is no record")
    return "".join(f"{line}\n" for line in [*lines, *keys])


# -- a trace, in the JSON that chrome://tracing and Perfetto read
#
# The format: "Trace Event Format"
# (https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU).
# Times are of the Unix clock, in microseconds, as those of torch's own events of compiling are.


_LOOKUPS, _COMPILES, _TRANSFERS = 1, 2, 3
_LANES = {_LOOKUPS: "lookups", _COMPILES: "compiles and saves", _TRANSFERS: "transfers"}
_LANE_OF = {"compile": _COMPILES, "save": _COMPILES}
_MICROSECONDS = 1e6


def trace(runs: Sequence[Run]) -> str:
    """What ``runs`` looked up, compiled, saved and transferred, as one trace.

    Each process has its own part, by rank, with a lane for lookups, one for compiles and saves, and
    those for transfers, of which some are under way at once.
    """
    events = [each for number, run in enumerate(runs, 1) for each in _events(number, run)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _events(number: int, run: Run) -> Iterator[dict[str, object]]:
    of = f"rank {run.rank}" if run.rank else run.name
    yield _name("process_name", number, 0, f"{run.program} ({of}), s3cache")
    yield {**_name("process_sort_index", number, 0, ""), "args": {"sort_index": number}}
    lanes = dict(_LANES)
    for record in run.records:
        yield _of_lookup(number, record)
    transfers = Lanes()
    for event in sorted(run.events, key=lambda each: each.time - each.elapsed_s):
        lane = _LANE_OF.get(event.event)
        if lane is None:
            lane = _TRANSFERS + transfers.take(event.time - event.elapsed_s, event.time)
            lanes[lane] = _LANES[_TRANSFERS]
        yield _event(number, lane, event)
    for lane, name in lanes.items():
        yield _name("thread_name", number, lane, name)


def _name(what: str, process: int, thread: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _span(
    process: int, lane: int, end: float, elapsed_s: float, name: str, args: dict[str, object]
) -> dict[str, object]:
    return {
        "ph": "X",
        "cat": "s3cache",
        "name": name,
        "pid": process,
        "tid": lane,
        "ts": (end - elapsed_s) * _MICROSECONDS,
        "dur": elapsed_s * _MICROSECONDS,
        "args": args,
    }


def _of_lookup(process: int, record: Record) -> dict[str, object]:
    args = {
        "key": record.key,
        "level": record.level,
        "saved_s": record.saved_s,
        "where": "{}:{} in {}".format(*record.where) if record.where else "",
        "rejected": list(record.rejected),
        "reasons": [reason.get("message", "") for reason in record.reasons],
    }
    name = f"{record.outcome}: {record.reason}"
    shown = {name: value for name, value in args.items() if value}
    return _span(process, _LOOKUPS, record.time, record.elapsed_s, name, shown)


def _event(process: int, lane: int, event: Event) -> dict[str, object]:
    name = event.event if event.ended == "done" else f"{event.event}: {event.ended}"
    shown = {"name": event.name, "bytes": event.size}
    return _span(process, lane, event.time, event.elapsed_s, name, shown)
