"""Write a page of HTML that stands by itself: it loads nothing, runs nothing, and may be mailed.

What it shows of keys, paths and reasons comes from records that others may have written, so all of
it is escaped, and the page's own policy forbids scripts and everything from elsewhere.
"""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Mapping, Sequence

from s3cache._pages import footer
from s3cache._version import __version__
from s3cache._words import counted, escape
from s3cache.insight._totals import Kind, Totals, is_counted, kind_of, name_of, sum_up
from s3cache.records import Event, Folded, Record, Run, folded, in_jobs, ranks_in_words

__all__ = ["page"]

# A page with more rows is slow to open; the numbers above are of all.
_ROWS_AT_MOST = 2_000
_NUMBERS = dict.fromkeys(("Waited", "Spared"), ' class="number"')

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --dim: #60646c; --line: #d9d9e0; --ground: #fff;
  --card: #f7f7f9; --local: #1f8a70; --remote: #2f6fde; --miss: #c2570c; --bypass: #6b6f76;
  --compile: #8e4ec6; --transfer: #9aa0a8; }
@media (prefers-color-scheme: dark) { :root { --ink: #eceef0; --dim: #9ba1a6; --line: #3a3f45;
  --ground: #151718; --card: #1f2224; --local: #4cc3a0; --remote: #7aa7ff; --miss: #ff9a52;
  --bypass: #a0a6ad; --compile: #bf7af0; --transfer: #6b7280; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1.5rem 1rem 4rem; background: var(--ground);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2.5rem 0 .75rem; }
p { margin: .25rem 0; } .dim { color: var(--dim); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .75rem;
  margin-top: 1.5rem; }
.tile { background: var(--card); border-radius: .5rem; padding: .75rem 1rem; }
.tile b { display: block; font-size: 1.6rem; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .875rem; }
th, td { text-align: left; vertical-align: top; padding: .4rem .75rem .4rem 0;
  border-bottom: 1px solid var(--line); }
th { color: var(--dim); font-weight: 500; }
.number { text-align: right;
  font-variant-numeric: tabular-nums; white-space: nowrap; }
code { font: .8125rem ui-monospace, monospace; overflow-wrap: anywhere; }
.mark { display: inline-block; width: .7em; height: .7em; border-radius: 50%; margin-right: .4em; }
@media (min-width: 40rem) {
  td:nth-child(1) { min-width: 9rem; } td:nth-child(2) { min-width: 15rem; }
}
@media (max-width: 40rem) {
  thead { display: none; }
  tr { display: block; padding: .5rem 0; border-bottom: 1px solid var(--line); }
  td, .number { display: block; text-align: left; border: 0; padding: .1rem 0; }
  td[data-label]::before { content: attr(data-label) " "; color: var(--dim); }
}
"""


def page(
    runs: Sequence[Run], explain: Callable[[Run, Record], str] | None = None, title: str = ""
) -> str:
    """What ``runs`` looked up, as one page of HTML.

    Args:
        explain: says of a miss or a bypass, in words, what it is due to.
        title: left out, the names of the programs.
    """
    title = title or ", ".join(dict.fromkeys(run.program for run in runs if run.program))
    totals = sum_up(runs)
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>s3cache: {escape(title)}</title>",
            f"<style>{_STYLE}{_DRAWING_STYLE}</style></head><body>",
            f"<h1>{escape(title) or 's3cache'}</h1>",
            f'<p class="dim">{escape(_when(runs))}</p>',
            _tiles(totals),
            "<h2>How lookups ended</h2>",
            _bars(totals.outcomes),
            "<h2>When</h2>",
            _timeline(runs),
            "<h2>Each lookup</h2>",
            _table(runs, explain),
            *(f'<p class="dim">{escape(more)}</p>' for more in [footer(totals.codes)] if more),
            f'<p class="dim">s3cache {escape(__version__)}</p></body></html>',
            "",
        ]
    )


def _when(runs: Sequence[Run]) -> str:
    started = min((run.started for run in runs if run.started), default=0.0)
    day = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(started)) if started else "no run"
    processes = counted(len(runs), "process", "processes")
    return f"{day}, {processes}"


def _tiles(totals: Totals) -> str:
    rate = "–" if totals.hit_rate is None else f"{totals.hit_rate:.0%}"
    tiles = [
        (rate, "of lookups hit"),
        (f"{totals.hits:,}", "hits"),
        (f"{totals.misses:,}", "misses"),
        (f"{totals.bypasses:,}", "bypasses"),
        (_duration(totals.spared_s), "of compiling spared"),
        (_duration(totals.waited_s), "waited for lookups"),
    ]
    shown = "".join(
        f'<div class="tile"><b>{escape(value)}</b>{escape(what)}</div>' for value, what in tiles
    )
    rest = "" if totals.complete else "<p>These runs looked up more than is on record.</p>"
    return f'<div class="tiles">{shown}</div>{rest}'


def _table(runs: Sequence[Run], explain: Callable[[Run, Record], str] | None) -> str:
    lookups = (lookup for job in reversed(in_jobs(runs)) for lookup in folded(job))
    found = [lookup for lookup in lookups if is_counted(lookup.record)]
    if not found:
        return "<p>Nothing was looked up.</p>"
    rows = [_row(each, len(runs), explain) for each in found[:_ROWS_AT_MOST]]
    left = len(found) - len(rows)
    more = f"<p>{left:,} more are left out here, and counted above.</p>" if left else ""
    names = ["Outcome", "Where", "Waited", "Spared", "Why"]
    head = "".join(f"<th{_NUMBERS.get(name, '')}>{name}</th>" for name in names)
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>{more}"
    )


def _row(lookup: Folded, processes: int, explain: Callable[[Run, Record], str] | None) -> str:
    record = lookup.record
    level = "" if record.level == "aot" else " (half of a graph)"
    where = ""
    if record.where is not None:
        file, line, function = record.where
        where = f"<code>{escape(file)}:{line}</code> {escape(function)}"
    why = explain(lookup.runs[0], record) if explain is not None and record.outcome != "hit" else ""
    if not why:
        why = "; ".join(_reason(reason) for reason in record.reasons)
    ranks = ranks_in_words(lookup.runs) if processes > 1 else ""
    rank = f" <span class=dim>{escape(ranks)}</span>" if ranks else ""
    key = f"<code class=dim>{escape(record.key[:16])}</code>" if record.key else ""
    key = f"<br>{key}" if where and key else key
    spared = _duration(lookup.saved_s) if lookup.saved_s else ""
    kind = kind_of(record.outcome, record.reason)
    return (
        f'<tr><td><span class="mark" style="background: var(--{kind})"></span>'
        f"{escape(name_of(record.outcome, record.reason))}{escape(level)}{rank}</td>"
        f"<td>{where}{key}</td>"
        f'<td class="number" data-label="waited">{_duration(lookup.elapsed_s)}</td>'
        f'<td class="number"{_labelled("spared", spared)}>{spared}</td>'
        f"<td>{escape(why)}</td></tr>"
    )


def _labelled(label: str, value: str) -> str:
    return f' data-label="{label}"' if value else ""


def _reason(reason: object) -> str:
    get = getattr(reason, "get", lambda *_: "")
    parts = (get("message", ""), get("line", ""), get("fix", ""))
    return ". ".join(str(part).rstrip(".") for part in parts if part)


def _duration(seconds: float) -> str:
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} h"
    if seconds >= 60:
        return f"{seconds / 60:.1f} min"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


# -- drawings, in SVG and in the colours of the page


_DRAWING_STYLE = """
.bars { display: grid; grid-template-columns: minmax(6rem, max-content) 1fr max-content;
  gap: .35rem .75rem; align-items: center; font-size: .875rem; }
.bar { height: .8rem; border-radius: .2rem; min-width: 2px; }
svg { display: block; width: 100%; min-width: 60rem; }
svg text { fill: var(--dim); font-size: 12px; }
.lane { stroke: var(--line); }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; font-size: .875rem; }
"""
_KINDS: dict[Kind, str] = {
    "local": "hit, here",
    "remote": "hit, remote",
    "miss": "miss",
    "bypass": "bypass",
}
_WIDTH, _LANE, _NAMES, _AXIS = 960, 22, 110, 26
# What is drawn of what else took time, and in which colour.
_EVENTS = {"compile": "compile", "download": "transfer", "upload": "transfer"}
# More lanes or marks than that cannot be read.
_LANES_AT_MOST = 64
_MARKS_AT_MOST = 5_000


def _bars(outcomes: Mapping[tuple[str, str], int]) -> str:
    """A bar for each outcome, the most frequent first."""
    if not outcomes:
        return "<p>Nothing was looked up.</p>"
    most = max(outcomes.values())
    rows = [
        f"<span>{html.escape(name_of(*ended))}</span><span class=bar style='width: "
        f"{100 * count / most:.1f}%; background: var(--{kind_of(*ended)})'></span>"
        f"<span>{count:,}</span>"
        for ended, count in outcomes.items()
    ]
    return f"<div class=_bars>{''.join(rows)}</div>"


def _timeline(runs: Sequence[Run]) -> str:
    """A lane for each process: its lookups, from beginning to end, over compiles and transfers."""
    lanes = [run for run in runs if run.records][:_LANES_AT_MOST]
    if not lanes:
        return "<p>Nothing was looked up.</p>"
    spans: list[Record | Event] = []
    for run in lanes:
        spans += [*run.records, *run.events]
    first = min([*map(_began, spans), *(run.started for run in lanes if run.started)])
    last = max(each.time for each in spans)
    scale = (_WIDTH - _NAMES - 10) / max(last - first, 1e-3)
    height = len(lanes) * _LANE + _AXIS
    label = "lookups of each process over time"
    drawn = [f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{label}">']
    marks = 0
    for number, run in enumerate(lanes):
        y = number * _LANE
        middle = y + _LANE / 2
        drawn.append(f'<text x="0" y="{middle + 4}">{html.escape(_lane_name(run))}</text>')
        drawn.append(
            f'<line class="lane" x1="{_NAMES}" x2="{_WIDTH}" y1="{middle}" y2="{middle}"/>'
        )
        for event in run.events:
            marks += 1
            if marks > _MARKS_AT_MOST or event.event not in _EVENTS:
                continue
            # Compiles above the line's lower edge, transfers on it: they are under way meanwhile.
            top = y + _LANE - (7 if event.event == "compile" else 4)
            drawn.append(
                f'<rect x="{_NAMES + (_began(event) - first) * scale:.1f}" y="{top}" '
                f'width="{max(event.elapsed_s * scale, 2):.1f}" height="3" '
                f'fill="var(--{_EVENTS[event.event]})">'
                f"<title>{html.escape(_event_title(event, first))}</title></rect>"
            )
        for record in run.records:
            marks += 1
            if marks > _MARKS_AT_MOST:
                break
            x = _NAMES + (_began(record) - first) * scale
            width = max(record.elapsed_s * scale, 3)
            kind = kind_of(record.outcome, record.reason)
            drawn.append(
                f'<rect x="{x:.1f}" y="{y + 2}" width="{width:.1f}" height="{_LANE - 10}" rx="1.5" '
                f'fill="var(--{kind})">'
                f"<title>{html.escape(_record_title(record, first))}</title></rect>"
            )
    drawn.append(_axis(last - first, scale, len(lanes) * _LANE))
    drawn.append("</svg>")
    legend = "".join(
        f'<span><span class="mark" style="background: var(--{kind})"></span>{text}</span>'
        for kind, text in [*_KINDS.items(), ("compile", "compiling"), ("transfer", "transfer")]
    )
    return f'<div class="legend">{legend}</div><div class="scroll">{"".join(drawn)}</div>'


def _lane_name(run: Run) -> str:
    return f"rank {run.rank}"[:14] if run.rank else run.name[:15]


def _axis(length_s: float, scale: float, y: int) -> str:
    step = _round_step(length_s / 6)
    ticks = []
    for number in range(7):
        x = _NAMES + number * step * scale
        if x > _WIDTH - 20:
            break
        ticks.append(f'<text x="{x:.1f}" y="{y + 18}">{_seconds(number * step)}</text>')
    return "".join(ticks)


def _round_step(seconds: float) -> float:
    """The next of 1, 2 and 5 and their tenfolds."""
    power = 1e-3
    while True:
        for digit in (1, 2, 5):
            if digit * power >= seconds:
                return digit * power
        power *= 10


def _seconds(seconds: float) -> str:
    return f"{seconds:g} s" if seconds >= 1 or not seconds else f"{seconds * 1e3:g} ms"


def _began(record: Record | Event) -> float:
    return record.time - record.elapsed_s


def _record_title(record: Record, first: float) -> str:
    where = "" if record.where is None else f", {record.where[0]}:{record.where[1]}"
    at = _began(record) - first
    return f"{record.outcome}: {record.reason}{where}; at {at:.2f} s, {record.elapsed_s:.3f} s"


def _event_title(event: Event, first: float) -> str:
    ended = "" if event.ended == "done" else f", {event.ended}"
    at = _began(event) - first
    return f"{event.event} {event.name[:24]}{ended}; at {at:.2f} s, {event.elapsed_s:.3f} s"
