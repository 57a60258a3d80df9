"""Sum up runs: as numbers, as the keys that they used, and as a trace."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from s3cache.records import Event, Lanes, Record, Run
from s3cache.stats import Reason
from s3cache.util.words import counted

#: Reasons of misses that need no action.
EXPECTED = frozenset(
    map(str, (Reason.ABSENT, Reason.GUARD, Reason.DISABLED, Reason.FORCED, Reason.RANKS))
)


@dataclass(frozen=True)
class Totals:
    """Sums of some runs, over the lookups for which :func:`is_counted`.

    Attributes:
        outcomes: how many lookups ended so, by outcome and reason; the most frequent first.
        hits, misses, bypasses: how many in all.
        spared_s: seconds that compiling what was hit took where it was compiled.
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
        """Return the share of lookups that hit; ``None`` where nothing was looked up."""
        lookups = self.hits + self.misses
        return self.hits / lookups if lookups else None

    @property
    def codes(self) -> list[str]:
        """Return the reasons of misses and bypasses about which something may be done."""
        reasons = (reason for outcome, reason in self.outcomes if outcome != "hit")
        codes = dict.fromkeys(code for reason in reasons for code in reason.split())
        return [code for code in codes if code not in EXPECTED]


def sum_up(runs: Sequence[Run]) -> Totals:
    """Return the sums of ``runs`` together."""
    records = [record for run in runs for record in run.records]
    outcomes = Counter((each.outcome, each.reason) for each in records if is_counted(each))
    hits, misses, bypasses = (
        sum(count for (outcome, _), count in outcomes.items() if outcome == wanted)
        for wanted in ("hit", "miss", "bypass")
    )
    return Totals(
        dict(outcomes.most_common()),
        hits,
        misses,
        bypasses,
        spared_s=sum(record.saved_s for record in records),
        waited_s=sum(record.elapsed_s for record in records),
        complete=all(run.complete for run in runs),
    )


def is_counted(record: Record) -> bool:
    """Return whether a lookup counts: not the miss of an FX graph whose whole graph missed."""
    return record.outcome == "hit" or not record.of_whole


def name_of(outcome: str, reason: str) -> str:
    """Return the outcome of a lookup, and its tier or reason."""
    return f"{outcome}: {reason}" if reason else outcome


def kind_of(outcome: str, reason: str) -> str:
    """Return ``local``, ``remote``, ``miss`` or ``bypass``, as which an unknown outcome counts."""
    if outcome == "hit":
        return "local" if reason == "local" else "remote"
    return "miss" if outcome == "miss" else "bypass"


# -- keys to copy to where the same is to run


def manifest(runs: Sequence[Run]) -> str:
    """Return the keys that ``runs`` hit, and those that they saved something under, one to a line.

    It leaves out misses that were not saved, and shape profiles, which are not recorded.
    """
    hits = (each.key for run in runs for each in run.records if each.outcome == "hit" and each.key)
    saves = (each.name for run in runs for each in run.events if each.event == "save")
    keys = dict.fromkeys([*hits, *saves])
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


def trace(runs: Sequence[Run]) -> str:
    """Return what ``runs`` looked up, compiled, saved and transferred, as one trace.

    Each process has its own section, by rank, with a lane for lookups, one for compiles and saves,
    and as many for transfers as were under way at once.
    """
    events = [
        {"pid": process, **event} for process, run in enumerate(runs, 1) for event in _events(run)
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _events(run: Run) -> Iterator[dict[str, object]]:
    of = f"rank {run.rank}" if run.rank else run.name
    yield _named("process_name", 0, f"{run.program} ({of}), s3cache")
    lanes = {_LOOKUPS: "lookups", _COMPILES: "compiles and saves", _TRANSFERS: "transfers"}
    for each in run.records:
        args = {
            "key": each.key,
            "level": each.level,
            "saved_s": each.saved_s,
            "where": "{}:{} in {}".format(*each.where) if each.where else "",
            "rejected": list(each.rejected),
            "reasons": [reason.get("message", "") for reason in each.reasons],
        }
        shown = {name: value for name, value in args.items() if value}
        yield _span(_LOOKUPS, each, f"{each.outcome}: {each.reason}", shown)
    transfers = Lanes()
    for event in sorted(run.events, key=lambda each: each.time - each.elapsed_s):
        lane = _COMPILES
        if event.event not in ("compile", "save"):
            lane = _TRANSFERS + transfers.take(event.time - event.elapsed_s, event.time)
            lanes[lane] = "transfers"
        name = event.event if event.ended == "done" else f"{event.event}: {event.ended}"
        yield _span(lane, event, name, {"name": event.name, "bytes": event.size})
    for lane, name in lanes.items():
        yield _named("thread_name", lane, name)


def _named(what: str, lane: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": what, "tid": lane, "args": {"name": name}}


def _span(lane: int, of: Record | Event, name: str, args: object) -> dict[str, object]:
    begin, took = (of.time - of.elapsed_s) * 1e6, of.elapsed_s * 1e6
    what = {"cat": "s3cache", "name": name, "args": args}
    return {"ph": "X", "tid": lane, "ts": begin, "dur": took, **what}
