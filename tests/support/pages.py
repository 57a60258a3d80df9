"""The programs on the pages of the documentation."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"# (\S+\.py)\n")
_PRINTS = re.compile(r"  # -> (.*)$", re.MULTILINE)


def programs(page: Path) -> list[str]:
    """Return the Python blocks on ``page`` that are programs: all that are not files."""
    return [block for block in _blocks(page) if not _FILE.match(block)]


def files(page: Path) -> dict[str, str]:
    """Return the Python blocks on ``page`` that name a file, by name and without that line."""
    named = {block: _FILE.match(block) for block in _blocks(page)}
    return {name[1]: block[name.end() :] for block, name in named.items() if name}


def _blocks(page: Path) -> list[str]:
    return _BLOCK.findall(page.read_text(encoding="utf-8"))


def printed(program: str) -> list[str]:
    """Return the lines that ``program`` should print, by its comments."""
    return _PRINTS.findall(program)
