"""The programs on the pages of the documentation."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"# (\S+\.py)\n")
_PRINTS = re.compile(r"  # -> (.*)$", re.MULTILINE)


def programs(page: Path) -> list[str]:
    """The blocks of Python on ``page`` that are a program each: all that are not files."""
    return [block for block in _blocks(page) if not _FILE.match(block)]


def files(page: Path) -> dict[str, str]:
    """The blocks of Python on ``page`` whose first line names a file; that line is not in it."""
    named = {block: _FILE.match(block) for block in _blocks(page)}
    return {name[1]: block[name.end() :] for block, name in named.items() if name}


def _blocks(page: Path) -> list[str]:
    return _BLOCK.findall(page.read_text(encoding="utf-8"))


def printed(program: str) -> list[str]:
    """The lines that ``program`` says it prints."""
    return _PRINTS.findall(program)
