"""Put the results of the benchmarks into docs/benchmarks.md.

    .venv/bin/python benchmarks/render.py

Replaces the text between ``<!-- bench:NAME -->`` and ``<!-- /bench:NAME -->`` in that page by the
tables of docs/benchmarks/NAME.json, for each such file. ``make bench-storage`` fills its block by
itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
    start, end = f"<!-- bench:{name} -->\n", f"<!-- /bench:{name} -->"
    block = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.DOTALL)
    filled, count = block.subn(lambda _: f"{start}{text}{end}", page)
    if count != 1:
        raise ValueError(f"found {count} bench:{name} blocks, not 1")
    return filled


def fill_page(name: str, results: str, command: str, *, parts: int) -> None:
    """Put the file of ``results`` into its block of the page, if it has so many parts."""
    document = json.loads(Path(results).read_text(encoding="utf-8"))
    if len(document["results"]) == parts:
        page = ROOT / "docs/benchmarks.md"
        text = render(document, command)
        page.write_text(fill(page.read_text(encoding="utf-8"), name, text), encoding="utf-8")


def main() -> None:
    page = ROOT / "docs/benchmarks.md"
    filled = page.read_text(encoding="utf-8")
    for name, command in COMMANDS.items():
        results = ROOT / f"docs/benchmarks/{name}.json"
        if results.exists():
            document = json.loads(results.read_text(encoding="utf-8"))
            filled = fill(filled, name, render(document, command))
    page.write_text(filled, encoding="utf-8")


if __name__ == "__main__":
    main()
