"""Put the results of the benchmarks into docs/benchmarks.md, and draw their charts as SVG.

    .venv/bin/python benchmarks/render.py

Replaces the text between ``<!-- bench:NAME -->`` and ``<!-- /bench:NAME -->`` in that page by the
tables of docs/benchmarks/NAME.json, for each such file. ``make bench-storage`` fills its block by
itself. Charts are readable on light and on dark pages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from html import escape
from pathlib import Path
from typing import Any

_WIDTH, _LABELS, _NUMBERS = 760, 290, 60  # pixels
_ROW, _BAR, _TOP = 30, 18, 44
_HEIGHT, _NAMES = 260, 330


def horizontal_bars(
    title: str, values: Mapping[str, float], *, emphasised: Collection[str] = ()
) -> str:
    """Draw one bar for each value, in order and from zero, with its name and number."""
    scale = (_WIDTH - _LABELS - _NUMBERS) / max(values.values())
    parts = [f'<text x="8" y="24" class="title">{escape(title)}</text>']
    for number, (name, value) in enumerate(values.items()):
        top = _TOP + number * _ROW
        kind = "ours" if name in emphasised else "other"
        length = value * scale
        size = f'width="{length:.1f}" height="{_BAR}"'
        parts += [
            f'<text x="{_LABELS - 8}" y="{top + 14}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{_LABELS}" y="{top}" {size} class="{kind}"/>',
            f'<text x="{_LABELS + length + 6:.1f}" y="{top + 14}">{value:.3g}</text>',
        ]
    return _svg(title, _TOP + len(values) * _ROW + 8, parts)


def lines(
    title: str,
    series: Mapping[str, Mapping[int, float]],
    *,
    unit: str,
    emphasised: Collection[str] = (),
) -> str:
    """Draw one line for each series over numbers of ``unit``, from zero, with its last value.

    A series without values was not run.
    """
    numbers = sorted({number for points in series.values() for number in points})
    highest = max((value for points in series.values() for value in points.values()), default=1.0)
    right, bottom = _WIDTH - _NAMES, _TOP + _HEIGHT

    def across(number: int) -> float:
        return right * number / numbers[-1]

    def down(value: float) -> float:
        return bottom - _HEIGHT * value / highest

    parts = [
        f'<text x="8" y="24" class="title">{escape(title)}</text>',
        f'<path d="M8 {bottom}H{right}" class="axis"/>',
        *(
            f'<text x="{across(each):.1f}" y="{bottom + 18}" text-anchor="end">{each} {unit}</text>'
            for each in numbers
        ),
    ]
    place = bottom + _ROW  # y of the name below
    for name, points in sorted(series.items(), key=lambda each: max(each[1].values(), default=0)):
        kind = "ours" if name in emphasised else "other"
        value = f"{points[max(points)]:.3g}" if points else "not run:"
        path = " ".join(f"{across(each):.1f},{down(points[each]):.1f}" for each in sorted(points))
        place = min(place - _BAR, down(points[max(points)]) + 4 if points else bottom)
        parts += [
            f'<polyline points="{path}" class="line {kind}"/>',
            f'<text x="{right + 8}" y="{place:.1f}">{value} {escape(name)}</text>',
        ]
    return _svg(title, bottom + 30, parts)


def _svg(title: str, height: int, parts: Collection[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" role="img" aria-label="{escape(title)}">\n'
        "<style>text{font:13px sans-serif;fill:#444}.title{font-weight:bold}"
        ".ours{fill:#2a7fd4;stroke:#2a7fd4}.other{fill:#9aa4ae;stroke:#9aa4ae}rect{stroke:none}"
        ".line{fill:none;stroke-width:2}.axis{stroke:#9aa4ae}"
        "@media(prefers-color-scheme:dark){text{fill:#ccc}}</style>\n"
        + "\n".join(parts)
        + "\n</svg>\n"
    )


ROOT = Path(__file__).resolve().parent.parent
#: Commands that write docs/benchmarks/NAME.json, by name.
COMMANDS = {
    "warm_start": "make bench",
    "signed": "make bench-signed",
    "keys": "make bench-keys",
}


def render(document: Mapping[str, Any], command: str) -> str:
    """Return Markdown for the results of ``command``."""
    parts = [of_result(result) for result in document["results"]]
    environment = document.get("environment", {})
    if environment:
        found = ", ".join(f"{name} {value}" for name, value in environment.items())
        parts.append(f"Measured with `{command}` on: {found}.\n")
    return "\n".join(parts)


def of_result(result: Mapping[str, Any]) -> str:
    lines = [f"### {result['title']}"]
    if result.get("chart"):
        lines += ["", f"![{result['title']}](benchmarks/{result['chart']})"]
    if result["columns"]:
        rows = [result["columns"], ["---"] * len(result["columns"]), *result["rows"]]
        lines += ["", *(f"| {' | '.join(row)} |" for row in rows)]
    for note in result.get("notes", ()):
        lines += ["", note]
    for bar in result.get("bars", ()):
        met = {True: "met", False: "**missed**", None: "not run"}[bar["met"]]
        value = ""
        if bar["value"] is not None:
            value = f" {bar['value']:.3g} {bar.get('unit', '')}".rstrip() + ";"
        lines += ["", f"{bar['what']}:{value} {bar['bound']} {bar['limit']:g} asked: {met}."]
    return "\n".join(lines) + "\n"


def fill(page: str, name: str, text: str) -> str:
    """Return ``page`` with ``text`` in its block ``name``.

    Raises:
        ValueError: the page has no such block, or several.
    """
    start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    block = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.DOTALL)
    filled, count = block.subn(lambda _: f"{start}{text}{end}", page)
    if count != 1:
        raise ValueError(f"found {count} blocks {name}, not 1")
    return filled


def fill_page(name: str, results: Path, command: str, *, parts: int = 0) -> None:
    """Put the file of ``results`` into its block of the page, if it has so many parts, or any."""
    document = json.loads(results.read_text(encoding="utf-8"))
    if len(document["results"]) == (parts or len(document["results"])):
        page = ROOT / "docs/benchmarks.md"
        text = fill(page.read_text(encoding="utf-8"), f"bench:{name}", render(document, command))
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    for _name, _command in COMMANDS.items():
        if (_results := ROOT / f"docs/benchmarks/{_name}.json").exists():
            fill_page(_name, _results, _command)
