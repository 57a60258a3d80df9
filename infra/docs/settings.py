"""Bring the tables of docs/configuration.md up to date with the settings that there are.

    .venv/bin/python -m infra.docs.settings [--check]

Each row has a setting's name, its default and what it means. Names and defaults come from the
dataclasses that declare them; rows of settings that are gone go. What it means is written on the
page, where it can link to other pages; a new setting gets an empty cell, below the one that is
declared before it. With ``--check`` nothing is written, and the status is 1 if the
page is not up to date.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from s3cache.settings import Settings
from s3cache.store import FileLocation, S3Options

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
#: What declares them, with what is no row: the path of a directory is its URL.
DECLARED: tuple[tuple[type, frozenset[str]], ...] = (
    (Settings, frozenset()),
    (S3Options, frozenset()),
    (FileLocation, frozenset({"path"})),
)
_ROW = re.compile(r"^\| `(\w+)` \| .*? \| (.*?) ?\|$")
_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def updated(page: str) -> str:
    """``page`` with a row for each setting, in the order in which it has them.

    Raises:
        ValueError: no row is there for a setting to stand below.
    """
    lines = page.splitlines()
    for of, without in DECLARED:
        declared = [each for each in fields(of) if each.name not in without]
        at = -1
        for each in declared:
            found = _row_of(lines, each.name)
            if found is None:
                if at < 0:
                    raise ValueError(f"{each.name}: there is no row of {of.__name__} before it")
                at += 1
                lines.insert(at, _row(each, ""))
            else:
                at = found
                matched = _ROW.match(lines[at])
                assert matched is not None
                lines[at] = _row(each, matched[2])
    known = {each.name for of, without in DECLARED for each in fields(of)} - {
        name for _, without in DECLARED for name in without
    }
    kept = [line for line in lines if not (row := _ROW.match(line)) or row[1] in known]
    return "\n".join(kept) + "\n"


def default_of(declared: Field[Any]) -> str:
    """As the page has it: what a user would write as text, or a word where there is no value."""
    if declared.name == "local_dir":
        return "`~/.cache/s3cache`"  # the reader's, not this machine's
    value = declared.default
    if value is MISSING:
        return "required"
    if value is None or value == "":
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, float):
        return f"`{value:g}`"
    if declared.name.endswith("_bytes"):
        unit, size = next((unit, size) for unit, size in _UNITS if value % size == 0)
        return f"`{value // size}{unit}`"
    return f"`{value}`"


def _row(declared: Field[Any], text: str) -> str:
    return f"| `{declared.name}` | {default_of(declared)} | {text} |".replace("|  |", "| |")


def _row_of(lines: list[str], name: str) -> int | None:
    for index, line in enumerate(lines):
        if (row := _ROW.match(line)) and row[1] == name:
            return index
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    options = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    new = updated(page)
    if options.check:
        return int(new != page)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
