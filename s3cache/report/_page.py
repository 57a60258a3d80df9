"""A page of HTML that stands by itself: it loads nothing, runs nothing, and may be mailed.

What it shows of keys, paths and reasons comes from records that others may have written, so all of
it is escaped, and the page's own policy forbids scripts and everything from elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from s3cache._notebooks import escape
from s3cache._pages import footer
from s3cache._version import __version__
from s3cache._words import counted
from s3cache.records import Folded, Record, Run, folded, in_jobs, ranks_in_words
from s3cache.report._drawing import STYLE as DRAWING_STYLE
from s3cache.report._drawing import bars, timeline
from s3cache.report._totals import Totals, is_counted, kind_of, name_of, sum_up

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
            f"<style>{_STYLE}{DRAWING_STYLE}</style></head><body>",
            f"<h1>{escape(title) or 's3cache'}</h1>",
            f'<p class="dim">{escape(_when(runs))}</p>',
            _tiles(totals),
            "<h2>How lookups ended</h2>",
            bars(totals.outcomes),
            "<h2>When</h2>",
            timeline(runs),
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
