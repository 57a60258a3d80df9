"""Sum up runs: as totals, as a list of keys, as a page of HTML, and as a trace.

Keys, paths and reasons come from records that others may have written, so the page escapes all of
them. Its content policy forbids scripts and external resources.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

from s3cache.entries import key_of
from s3cache.insight._explain import Explanation, reasons_of
from s3cache.records import Event, Record, Run, folded, in_jobs, processes_in_words
from s3cache.seam import features, hints, kinds, reasons
from s3cache.util import __version__
from s3cache.util.text import counted, escape, footer, printable

#: Reasons of misses that need no action.
EXPECTED = frozenset(str(reason) for reason in reasons() if reason.is_expected)
_KINDS = frozenset(kinds())  # of entries that features look up
_FEATURES = [feature.name for feature in features()]  # the names of their events
_LANES = {name: title for feature in features() for name, title in feature.events}
_REFUSED = "refused: "  # the outcome of an event, followed by the code


@dataclass(frozen=True)
class Totals:
    """Totals of some runs, over the lookups for which :func:`is_counted`."""

    outcomes: Mapping[tuple[str, str], int]  # by outcome and reason; most frequent first
    hits: int
    misses: int
    bypasses: int
    spared_s: float  # the time that compiling the hits took when they were compiled
    waited_s: float  # the time that compiling threads waited for lookups
    unused: int  # entries that a process fetched early and did not look up
    unused_bytes: int
    # Outcomes of each feature and each kind of its entries; other totals do not include these.
    features: Mapping[str, Mapping[str, int]]
    more: Mapping[str, object]  # what features add as data,
    lines: Sequence[str]  # and in words
    complete: bool  # whether all lookups of these runs are recorded

    @property
    def hit_rate(self) -> float | None:
        """Return the share of lookups that hit; ``None`` if there were no lookups."""
        lookups = self.hits + self.misses
        return self.hits / lookups if lookups else None

    @property
    def codes(self) -> list[str]:
        """Return the reasons of misses, bypasses and refusals that a user may be able to fix."""
        codes = [code for outcome, why in self.outcomes if outcome != "hit" for code in why.split()]
        ends = (ended for counts in self.features.values() for ended in counts)
        codes += [ended.removeprefix(_REFUSED) for ended in ends if _REFUSED in ended]
        return [*dict.fromkeys(code for code in codes if code not in EXPECTED)]

    @property
    def in_words(self) -> Sequence[str]:
        """Return ``NAME: 3 hit: remote, 1 miss: absent`` for features and kinds, and ``lines``."""
        lines = []
        for name, counts in self.features.items():
            ends = ", ".join(f"{count} {printable(ended)}" for ended, count in counts.items())
            lines.append(f"{name}: {ends}")
        return [*lines, *self.lines]

    def as_dict(self) -> dict[str, object]:
        """Return the totals as plain data, without words."""
        own = {name: of for name, of in vars(self).items() if name not in ("more", "lines")}
        outcomes = [
            {"outcome": outcome, "reason": reason, "count": count}
            for (outcome, reason), count in self.outcomes.items()
        ]
        return {**own, **self.more, "hit_rate": self.hit_rate, "outcomes": outcomes}


def sum_up(runs: Sequence[Run]) -> Totals:
    records = [record for run in runs for record in run.records]
    events = [event for run in runs for event in run.events]
    ends = [(record.outcome, record.reason) for record in records if is_counted(record)]
    counts = Counter(outcome for outcome, _ in ends)
    # The sizes of entries that a run fetched for graphs that it did not look up.
    unused = [
        event.size
        for run in runs
        for looked_up in [{record.key for record in run.records}]
        for event in run.events
        if (event.event, event.ended) == ("download", "done")
        and not (key := key_of(event.name)).startswith(hints())
        and key not in looked_up
    ]
    of_features: dict[str, Counter[str]] = defaultdict(Counter)
    for event in events:
        if event.event in _FEATURES:
            of_features[event.event][event.ended] += 1
    without_events = _KINDS.difference(event.event for event in events)
    for record in records:
        if record.kind in without_events:
            of_features[record.kind][name_of(record.outcome, record.reason)] += 1
    reports = [it.call(it.reports, runs) for it in features()]
    own = [report for report in reports if report is not None]
    return Totals(
        dict(Counter(ends).most_common()),
        *(counts["hit"], counts["miss"], counts["bypass"]),
        spared_s=sum(record.saved_s for record in records),
        waited_s=sum(record.elapsed_s for record in records),
        unused=len(unused),
        unused_bytes=sum(unused),
        features={name: dict(of.most_common()) for name, of in of_features.items()},
        more={name: value for data, _ in own for name, value in data.items()},
        lines=[line for _, lines in own for line in lines],
        complete=all(run.complete for run in runs),
    )


def names_of(runs: Sequence[Run]) -> dict[str, str]:
    """Return names of processes by their ids."""
    return {str(run.pid): run.process or f"process {run.pid}" for run in runs}


def with_name(ended: str, names: Mapping[str, str]) -> str:
    """Return the outcome of an event with a name in place of a ``PID@HOST`` that ends it."""
    how, is_for, process = ended.rpartition("for ")
    if not is_for:
        return ended
    pid = "" if process.endswith(")") else process.partition("@")[0]  # else of another machine
    return f"{how}for {names.get(pid, printable(process))}"


def is_counted(record: Record) -> bool:
    """Return whether a lookup counts.

    A miss of an FX graph does not count if its whole graph missed.
    """
    if record.kind in _KINDS:
        return False
    return record.outcome == "hit" or not record.of_whole


def name_of(outcome: str, reason: str) -> str:
    """Return the outcome of a lookup with its tier or reason."""
    return f"{outcome}: {reason}" if reason else outcome


def manifest(runs: Sequence[Run]) -> str:
    """Return the keys that ``runs`` hit, and those of entries they saved, one per line.

    It leaves out misses that were not saved.
    """
    hits = (it.key for run in runs for it in run.records if it.outcome == "hit" and it.key)
    saves = (it.name for run in runs for it in run.events if it.event == "save")
    keys = dict.fromkeys([*hits, *saves])
    lines = [f"# {counted(len(keys), 'key')} that {' '.join(run.name for run in runs)} used"]
    if not all(run.complete for run in runs):
        lines.append("# there were more keys, which are not recorded")
    return "".join(f"{line}\n" for line in [*lines, *keys])


# -- a trace, in the JSON that chrome://tracing and Perfetto read
#
# The format: "Trace Event Format"
# (https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU).
# Times are Unix times in microseconds, like those of torch's own compile events.


def trace(runs: Sequence[Run]) -> str:
    """Return the lookups, compiles, saves and transfers of ``runs`` as one trace.

    Each process has its own section, by name. It has a lane for lookups, one for compiles and
    saves, those of features with events, and as many for transfers as ran at once.
    """
    names = names_of(runs)
    events = [
        {"pid": process, **event}
        for process, run in enumerate(runs, 1)
        for event in _events(run, names)
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _events(run: Run, names: Mapping[str, str]) -> Iterator[dict[str, object]]:
    lanes = {("lookups", 0): 1, ("compiles and saves", 0): 2}

    def span(
        of: Record | Event, title: str, name: str, args: object, number: int = 0
    ) -> dict[str, object]:
        lane = lanes.setdefault((title, number), len(lanes) + 1)
        begin, took = (of.time - of.elapsed_s) * 1e6, of.elapsed_s * 1e6
        what = {"cat": "s3cache", "name": name, "args": args}
        return {"ph": "X", "tid": lane, "ts": begin, "dur": took, **what}

    yield _label("process_name", 0, f"{run.program} ({run.process or run.name}), s3cache")
    for record in run.records:
        args = {
            "key": record.key,
            "kind": record.kind,
            "saved_s": record.saved_s,
            "where": "{}:{} in {}".format(*record.where) if record.where else "",
            "rejected": list(record.rejected),
            "reasons": [reason.get("message", "") for reason in record.reasons],
        }
        shown = {name: value for name, value in args.items() if value}
        yield span(record, "lookups", f"{record.outcome}: {record.reason}", shown)
    ends: list[float] = []  # of the last transfer in each lane
    for event in sorted(run.events, key=lambda event: event.time - event.elapsed_s):
        title, number = "compiles and saves", 0
        if event.event in _FEATURES:
            title = event.event
        elif event.event in _LANES:
            title = _LANES[event.event]
        elif event.event not in ("compile", "save"):
            began, title = event.time - event.elapsed_s, "transfers"
            number = next((index for index, end in enumerate(ends) if end <= began), len(ends))
            ends[number : number + 1] = [event.time]
        ended = with_name(event.ended, names) if event.event in _LANES else event.ended
        name = event.event if ended == "done" else f"{event.event}: {ended}"
        yield span(event, title, name, {"name": event.name, "bytes": event.size}, number)
    for (title, _), lane in lanes.items():
        yield _label("thread_name", lane, title)


def _label(what: str, lane: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": what, "tid": lane, "args": {"name": name}}


# -- one page of HTML that loads nothing, runs nothing, and can be mailed

_MAX_ROWS = 2_000  # a page with more is slow to open; the totals above them count all lookups
_INCOMPLETE = "These runs had more lookups than are recorded"


def page(runs: Sequence[Run], explanations: Iterable[Explanation] = ()) -> str:
    """Return the lookups of ``runs`` as one page of HTML, with explanations."""
    causes = {(why.record.key, why.record.time): why.line for why in explanations}
    title = ", ".join(dict.fromkeys(run.program for run in runs if run.program))
    totals = sum_up(runs)
    started = min((run.started for run in runs if run.started), default=0.0)
    day = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(started)) if started else "no run"
    lookups = [lookup for job in reversed(in_jobs(runs)) for lookup in folded(job)]
    lookups = [(record, its_runs) for record, its_runs in lookups if is_counted(record)]
    tiles = {
        "of lookups hit": "–" if totals.hit_rate is None else f"{totals.hit_rate:.0%}",
        "hits": f"{totals.hits:,}",
        "misses": f"{totals.misses:,}",
        "bypasses": f"{totals.bypasses:,}",
        "of compiling spared": duration(totals.spared_s),
        "waited for lookups": duration(totals.waited_s),
        "fetched, not used": f"{totals.unused:,}",
    }
    more = len(lookups) - _MAX_ROWS
    notes = [*totals.in_words, "" if totals.complete else _INCOMPLETE]
    end = [
        f"{more:,} more lookups are not shown here, but counted above" if more > 0 else "",
        escape(footer(totals.codes)),
        f"s3cache {__version__}",
    ]
    most = max(totals.outcomes.values(), default=0)
    bars = (
        f'<span>{escape(name_of(*ended))}</span><span class="bar {_kind_of(*ended)}" '
        f'style="width: {100 * count / most:.1f}%"></span><span>{count:,}</span>'
        for ended, count in totals.outcomes.items()
    )
    template = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(title) or "s3cache",
        when=escape(f"{day}, {counted(len(runs), 'process', 'processes')}"),
        tiles="".join(f'<div class="tile"><b>{n}</b>{what}</div>' for what, n in tiles.items()),
        note="".join(f"<p>{escape(note)}.</p>" for note in notes if note),
        bars="".join(bars) or "Nothing was looked up.",
        rows="".join(_row(*lookup, len(runs), causes) for lookup in lookups[:_MAX_ROWS]),
        end="<br>".join(filter(None, end)),
    )


def _kind_of(outcome: str, reason: str) -> str:
    """Return ``local``, ``remote``, ``miss`` or ``bypass``, which is also for unknown outcomes."""
    if outcome == "hit":
        return "local" if reason == "local" else "remote"
    return "miss" if outcome == "miss" else "bypass"


def _row(
    record: Record, runs: list[Run], processes: int, causes: Mapping[tuple[str, float], str]
) -> str:
    ended = (record.outcome, record.reason)
    kind = "" if record.kind == "aot" else " (FX graph)"
    who = f" <span class=dim>{escape(processes_in_words(runs))}</span>" if processes > 1 else ""
    where = []
    if record.where is not None:
        file, line, function = record.where
        where.append(f"<code>{escape(file)}:{line}</code> {escape(function)}")
    if record.key:
        where.append(f"<code class=dim>{escape(record.key[:16])}</code>")
    why = causes.get((record.key, record.time), "; ".join(reasons_of(record)))
    return (
        f'<tr><td><span class="mark {_kind_of(*ended)}"></span>'
        f"{escape(name_of(*ended) + kind)}{who}</td>"
        f"<td>{'<br>'.join(where)}</td>"
        f'<td class="number">{duration(record.elapsed_s)}</td>'
        f'<td class="number">{duration(record.saved_s) if record.saved_s else ""}</td>'
        f"<td>{escape(why)}</td></tr>"
    )


def duration(seconds: float) -> str:
    """Return a time in the largest unit that fits."""
    for length, unit in ((3600, "h"), (60, "min"), (1, "s")):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds * 1e3:.0f} ms"
