"""Update the tables of docs/configuration.md from the settings.

    .venv/bin/python -m infra.docs.settings

Each row has a setting's name, its default and its meaning. Names and defaults come from the
dataclasses that declare them. Rows of removed settings are removed. The meaning is written on the
page, where it can link to other pages; a new setting gets an empty cell, below the setting that is
declared before it.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from s3cache.settings import Settings
from s3cache.store import FileLocation, S3Options

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
#: Classes that declare settings, and their fields without a row: a directory's path is its URL.
DECLARED: tuple[tuple[type, frozenset[str]], ...] = (
    (Settings, frozenset()),
    (S3Options, frozenset()),
    (FileLocation, frozenset({"path"})),
)
_ROW = re.compile(r"^\| `(\w+)` \| .*? \| (.*?) ?\|$")
_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def updated(page: str) -> str:
    """Return ``page`` with a row for each setting; its rows keep their order.

    Raises:
        ValueError: the page has no row to put a new setting below.
    """
    lines, known = page.splitlines(), set[str]()
    for owner, without in DECLARED:
        at = -1
        for each in fields(owner):
            if each.name in without:
                continue
            known.add(each.name)
            found = [row for line in lines if (row := _ROW.match(line)) and row[1] == each.name]
            if not found and at < 0:
                raise ValueError(f"{each.name}: no row of {owner.__name__} comes before it")
            if found:
                at = lines.index(found[0][0])
                lines[at] = _row(each, found[0][2])
            else:
                at += 1
                lines.insert(at, _row(each, ""))
    kept = [line for line in lines if not (row := _ROW.match(line)) or row[1] in known]
    return "\n".join(kept) + "\n"


def default_of(declared: Field[Any]) -> str:
    """Return the default as on the page: the text that a user would write, or a word for none."""
    if declared.name == "local_dir":
        return "`~/.cache/s3cache`"  # of the reader, not of this machine
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


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
