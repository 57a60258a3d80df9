"""Write a report as one page of HTML that loads nothing, runs nothing, and may be mailed.

Keys, paths and reasons come from records that others may have written, so all of them are escaped,
and the page's own policy forbids scripts and everything from elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from s3cache.insight._totals import Kind, Totals, is_counted, kind_of, name_of, sum_up
from s3cache.records import Event, Folded, Record, Run, folded, in_jobs, ranks_in_words
from s3cache.util import __version__
from s3cache.util.pages import footer
from s3cache.util.words import counted, escape

# A page with more rows is slow to open; the numbers above the table are of all.
_MAX_ROWS = 2_000
# More lanes or marks cannot be read.
_MAX_LANES = 64
_MAX_MARKS = 5_000

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
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
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
.bars { display: grid; grid-template-columns: minmax(6rem, max-content) 1fr max-content;
  gap: .35rem .75rem; align-items: center; font-size: .875rem; }
.bar { height: .8rem; border-radius: .2rem; min-width: 2px; }
svg { display: block; width: 100%; min-width: 60rem; }
svg text { fill: var(--dim); font-size: 12px; }
.lane { stroke: var(--line); }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; font-size: .875rem; }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_NOTHING = "<p>Nothing was looked up.</p>"


def page(
    runs: Sequence[Run], explain: Callable[[Run, Record], str] | None = None, title: str = ""
) -> str:
    """Return the lookups of ``runs`` as one page of HTML.

    Args:
        explain: gives the cause of a miss or a bypass in words.
        title: left out, the names of the programs.
    """
    title = title or ", ".join(dict.fromkeys(run.program for run in runs if run.program))
    totals = sum_up(runs)
    started = min((run.started for run in runs if run.started), default=0.0)
    day = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(started)) if started else "no run"
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>s3cache: {escape(title)}</title>",
            f"<style>{_STYLE}</style></head><body>",
            f"<h1>{escape(title) or 's3cache'}</h1>",
            _dim(f"{day}, {counted(len(runs), 'process', 'processes')}"),
            _tiles(totals),
            "<h2>How lookups ended</h2>",
            _bars(totals.outcomes),
            "<h2>When</h2>",
            _timeline(runs),
            "<h2>Each lookup</h2>",
            _table(runs, explain),
            *(_dim(more) for more in [footer(totals.codes)] if more),
            _dim(f"s3cache {__version__}"),
            "</body></html>",
            "",
        ]
    )


def _dim(text: str) -> str:
    return f'<p class="dim">{escape(text)}</p>'


def _tiles(totals: Totals) -> str:
    rate = "–" if totals.hit_rate is None else f"{totals.hit_rate:.0%}"
    tiles = {
        "of lookups hit": rate,
        "hits": f"{totals.hits:,}",
        "misses": f"{totals.misses:,}",
        "bypasses": f"{totals.bypasses:,}",
        "of compiling spared": _duration(totals.spared_s),
        "waited for lookups": _duration(totals.waited_s),
    }
    shown = "".join(f'<div class="tile"><b>{n}</b>{what}</div>' for what, n in tiles.items())
    rest = "" if totals.complete else "<p>These runs looked up more than is on record.</p>"
    return f'<div class="tiles">{shown}</div>{rest}'


def _bars(outcomes: Mapping[tuple[str, str], int]) -> str:
    """Draw a bar for each outcome, the most frequent first."""
    most = max(outcomes.values(), default=0)
    rows = "".join(
        f'<span>{escape(name_of(*ended))}</span><span class="bar" style="width: '
        f'{100 * count / most:.1f}%; background: var(--{kind_of(*ended)})"></span>'
        f"<span>{count:,}</span>"
        for ended, count in outcomes.items()
    )
    return f'<div class="bars">{rows}</div>' if rows else _NOTHING


# -- the table of lookups


def _table(runs: Sequence[Run], explain: Callable[[Run, Record], str] | None) -> str:
    lookups = (lookup for job in reversed(in_jobs(runs)) for lookup in folded(job))
    found = [lookup for lookup in lookups if is_counted(lookup.record)]
    if not found:
        return _NOTHING
    rows = "".join(_row(each, len(runs), explain) for each in found[:_MAX_ROWS])
    left = len(found) - _MAX_ROWS
    more = f"<p>{left:,} more are left out here, and counted above.</p>" if left > 0 else ""
    number = '<th class="number">'
    head = f"<th>Outcome</th><th>Where</th>{number}Waited</th>{number}Spared</th><th>Why</th>"
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{more}"
    )


def _row(lookup: Folded, processes: int, explain: Callable[[Run, Record], str] | None) -> str:
    record = lookup.record
    why = explain(lookup.runs[0], record) if explain is not None and record.outcome != "hit" else ""
    if not why:
        sentences = (
            ". ".join(
                reason[name].rstrip(".") for name in ("message", "line", "fix") if reason.get(name)
            )
            for reason in record.reasons
        )
        why = "; ".join(sentences)
    level = "" if record.level == "aot" else " (half of a graph)"
    rank = f" <span class=dim>{escape(ranks_in_words(lookup.runs))}</span>" if processes > 1 else ""
    where = []
    if record.where is not None:
        file, line, function = record.where
        where.append(f"<code>{escape(file)}:{line}</code> {escape(function)}")
    if record.key:
        where.append(f"<code class=dim>{escape(record.key[:16])}</code>")
    spared = _duration(lookup.saved_s) if lookup.saved_s else ""
    label = ' data-label="spared"' if spared else ""
    return (
        f"<tr><td>{_mark(kind_of(record.outcome, record.reason))}"
        f"{escape(name_of(record.outcome, record.reason) + level)}{rank}</td>"
        f"<td>{'<br>'.join(where)}</td>"
        f'<td class="number" data-label="waited">{_duration(lookup.elapsed_s)}</td>'
        f'<td class="number"{label}>{spared}</td>'
        f"<td>{escape(why)}</td></tr>"
    )


def _mark(kind: str) -> str:
    return f'<span class="mark" style="background: var(--{kind})"></span>'


def _duration(seconds: float) -> str:
    for length, unit in ((3600, "h"), (60, "min"), (1, "s")):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds * 1e3:.0f} ms"


# -- the timeline, in SVG and in the colours of the page


_KINDS: dict[Kind | str, str] = {
    "local": "hit, here",
    "remote": "hit, remote",
    "miss": "miss",
    "bypass": "bypass",
    "compile": "compiling",
    "transfer": "transfer",
}
_WIDTH, _LANE, _NAMES, _AXIS = 960, 22, 110, 26
# The colour of events that are drawn, and how far above the lane's lower edge: both may overlap.
_EVENTS = {"compile": ("compile", 7), "download": ("transfer", 4), "upload": ("transfer", 4)}


def _timeline(runs: Sequence[Run]) -> str:
    """Draw a lane for each process: its lookups, over compiles and transfers."""
    lanes = [run for run in runs if run.records][:_MAX_LANES]
    if not lanes:
        return _NOTHING
    spans: list[Record | Event] = [record for run in lanes for record in run.records]
    spans += [event for run in lanes for event in run.events]
    began = [each.time - each.elapsed_s for each in spans]
    first = min([*began, *(run.started for run in lanes if run.started)])
    length_s = max(each.time for each in spans) - first
    scale = (_WIDTH - _NAMES - 10) / max(length_s, 1e-3)

    def mark(span: Record | Event, kind: str, y: int, height: int, least: int, what: str) -> str:
        at_s = span.time - span.elapsed_s - first
        title = f"{what}; at {at_s:.2f} s, {span.elapsed_s:.3f} s"
        width = max(span.elapsed_s * scale, least)
        return (
            f'<rect x="{_NAMES + at_s * scale:.1f}" y="{y}" width="{width:.1f}" '
            f'height="{height}" rx="1.5" fill="var(--{kind})">'
            f"<title>{escape(title)}</title></rect>"
        )

    names, marks = [], []
    for y, run in zip(range(0, len(lanes) * _LANE, _LANE), lanes, strict=True):
        middle = y + _LANE // 2
        name = f"rank {run.rank}"[:14] if run.rank else run.name[:15]
        names += [
            f'<text x="0" y="{middle + 4}">{escape(name)}</text>',
            f'<line class="lane" x1="{_NAMES}" x2="{_WIDTH}" y1="{middle}" y2="{middle}"/>',
        ]
        for event in run.events:
            if event.event in _EVENTS:
                kind, above = _EVENTS[event.event]
                ended = "" if event.ended == "done" else f", {event.ended}"
                what = f"{event.event} {event.name[:24]}{ended}"
                marks.append(mark(event, kind, y + _LANE - above, 3, 2, what))
        for record in run.records:
            where = "" if record.where is None else f", {record.where[0]}:{record.where[1]}"
            what = f"{record.outcome}: {record.reason}{where}"
            kind = kind_of(record.outcome, record.reason)
            marks.append(mark(record, kind, y + 2, _LANE - 10, 3, what))
    height = len(lanes) * _LANE
    drawn = (
        f'<svg viewBox="0 0 {_WIDTH} {height + _AXIS}" role="img" '
        f'aria-label="lookups of each process over time">{"".join(names)}'
        f"{''.join(marks[:_MAX_MARKS])}{''.join(_axis(length_s, scale, height))}</svg>"
    )
    legend = "".join(f"<span>{_mark(kind)}{text}</span>" for kind, text in _KINDS.items())
    return f'<div class="legend">{legend}</div><div class="scroll">{drawn}</div>'


def _axis(length_s: float, scale: float, y: int) -> Iterator[str]:
    """Write the time at 1, 2 or 5 times a power of ten apart."""
    steps = (digit * 10.0**power for power in range(-3, 12) for digit in (1, 2, 5))
    step = next(each for each in steps if each >= length_s / 6)
    for number in range(7):
        x = _NAMES + number * step * scale
        if x <= _WIDTH - 20:
            at = number * step
            text = f"{at:g} s" if at >= 1 or not at else f"{at * 1e3:g} ms"
            yield f'<text x="{x:.1f}" y="{y + 18}">{text}</text>'
