"""The programs on the pages of the documentation."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["ROOT", "printed", "programs"]

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_PRINTS = re.compile(r"  # -> (.*)$", re.MULTILINE)


def programs(page: Path) -> list[str]:
    """The blocks of Python on ``page``, each of which is a program."""
    return _BLOCK.findall(page.read_text(encoding="utf-8"))


def printed(program: str) -> list[str]:
    """The lines that ``program`` says it prints."""
    return _PRINTS.findall(program)
