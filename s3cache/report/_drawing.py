"""Drawings in SVG, in the colours of the page that they stand on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from s3cache.records import Event, Record, Run
from s3cache.report._totals import Kind, kind_of, name_of

__all__ = ["STYLE", "bars", "timeline"]

STYLE = """
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
# More lanes or marks than that tell nobody anything.
_LANES_AT_MOST = 64
_MARKS_AT_MOST = 5_000


def bars(outcomes: Mapping[tuple[str, str], int]) -> str:
    """A bar for each outcome, the most frequent first."""
    if not outcomes:
        return "<p>Nothing was looked up.</p>"
    most = max(outcomes.values())
    rows = [
        f"<span>{escape(name_of(*ended))}</span><span class=bar style='width: "
        f"{100 * count / most:.1f}%; background: var(--{kind_of(*ended)})'></span>"
        f"<span>{count:,}</span>"
        for ended, count in outcomes.items()
    ]
    return f"<div class=bars>{''.join(rows)}</div>"


def timeline(runs: Sequence[Run]) -> str:
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
        drawn.append(f'<text x="0" y="{middle + 4}">{escape(_lane_name(run))}</text>')
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
                f"<title>{escape(_told(event, first))}</title></rect>"
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
                f'fill="var(--{kind})"><title>{escape(_said(record, first))}</title></rect>'
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


def _said(record: Record, first: float) -> str:
    where = "" if record.where is None else f", {record.where[0]}:{record.where[1]}"
    at = _began(record) - first
    return f"{record.outcome}: {record.reason}{where}; at {at:.2f} s, {record.elapsed_s:.3f} s"


def _told(event: Event, first: float) -> str:
    ended = "" if event.ended == "done" else f", {event.ended}"
    at = _began(event) - first
    return f"{event.event} {event.name[:24]}{ended}; at {at:.2f} s, {event.elapsed_s:.3f} s"
