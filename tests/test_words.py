"""Numbers agree with their nouns."""

from __future__ import annotations

import re
from pathlib import Path

from s3cache._words import counted

ROOT = Path(__file__).resolve().parents[1]
# A number that is put right before a noun in the plural, whatever it is.
_ANY = re.compile(
    r"\{[^{}]+\} (?:entries|graphs|faults|warnings|files|keys|objects|lookups|hits)\b"
)


def test_one_is_singular_and_all_others_are_plural() -> None:
    assert [counted(number, "key") for number in (0, 1, 2)] == ["0 keys", "1 key", "2 keys"]
    assert [counted(number, "entry", "entries") for number in (1, 11)] == ["1 entry", "11 entries"]


def test_no_command_tells_of_one_entries() -> None:
    """Each number that is told beside a noun goes by way of ``counted``."""
    assert _ANY.search('f"{shown} entries"')
    shown = {
        f"{path.name}: {found}"
        for room in ("cli", "insight", "manage")
        for path in (ROOT / "s3cache" / room).glob("*.py")
        for found in _ANY.findall(path.read_text(encoding="utf-8"))
    }
    assert shown == set()
