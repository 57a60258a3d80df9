"""Put the results of the storage benchmark into the README.

    .venv/bin/python benchmarks/render.py [--check]

Replaces what is between ``<!-- bench:storage -->`` and ``<!-- /bench:storage -->`` in README.md by
the tables in docs/benchmarks/storage.json. With ``--check`` it writes nothing and ends with status
1 if they differ.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_BLOCK = re.compile(r"(<!-- bench:storage -->\n).*?(<!-- /bench:storage -->)", re.DOTALL)


def render(document: Mapping[str, Any]) -> str:
    """Markdown for what ``benchmarks/storage.py`` wrote."""
    if "markdown" in document:
        return str(document["markdown"]).strip() + "\n"
    parts = [_result(result) for result in document["results"]]
    environment = document.get("environment", {})
    if environment:
        told = ", ".join(f"{name} {value}" for name, value in environment.items())
        parts.append(f"Measured with `make bench-storage` on: {told}.\n")
    return "\n".join(parts)


def _result(result: Mapping[str, Any]) -> str:
    rows = [result["columns"], ["---"] * len(result["columns"]), *result["rows"]]
    lines = [f"### {result['title']}", "", *(f"| {' | '.join(row)} |" for row in rows)]
    for note in result.get("notes", ()):
        lines += ["", note]
    for bar in result.get("bars", ()):
        met = "met" if bar["met"] else "**missed**"
        value = f"{bar['value']:.3g} {bar.get('unit', '')}".rstrip()
        lines += ["", f"{bar['what']}: {value}; {bar['bound']} {bar['limit']:g} asked: {met}."]
    return "\n".join(lines) + "\n"


def fill(page: str, text: str) -> str:
    """``page`` with ``text`` in its block.

    Raises:
        ValueError: the page has not exactly one.
    """
    filled, count = _BLOCK.subn(lambda found: f"{found[1]}{text}{found[2]}", page)
    if count != 1:
        raise ValueError(f"found {count} bench:storage blocks, not 1")
    return filled


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, default=ROOT / "docs/benchmarks/storage.json")
    parser.add_argument("--page", type=Path, default=ROOT / "README.md")
    parser.add_argument("--check", action="store_true", help="only say whether they agree")
    options = parser.parse_args()
    page = options.page.read_text(encoding="utf-8")
    filled = fill(page, render(json.loads(options.json.read_text(encoding="utf-8"))))
    if options.check:
        return int(filled != page)
    options.page.write_text(filled, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
