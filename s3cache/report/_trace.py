"""Runs as a trace, in the JSON that chrome://tracing and Perfetto read.

The format: "Trace Event Format" (https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU).
Times are of the Unix clock, in microseconds, as those of torch's own events of compiling are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from s3cache.records import Event, Lanes, Record, Run

__all__ = ["trace"]

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
    told = {name: value for name, value in args.items() if value}
    return _span(process, _LOOKUPS, record.time, record.elapsed_s, name, told)


def _event(process: int, lane: int, event: Event) -> dict[str, object]:
    name = event.event if event.ended == "done" else f"{event.event}: {event.ended}"
    told = {"name": event.name, "bytes": event.size}
    return _span(process, lane, event.time, event.elapsed_s, name, told)
