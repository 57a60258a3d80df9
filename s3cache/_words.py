"""Numbers with their nouns; text of others, made fit to be shown."""

from __future__ import annotations

import re

__all__ = ["counted", "may_be_a_key", "printable", "printable_lines"]

# 32 bytes, as base64 has them.
_KEY = re.compile(r"[A-Za-z0-9+=]{40,}")
_KEY_BYTES = 32


def counted(number: int, noun: str, plural: str = "") -> str:
    """``1 entry``, ``2 entries``; without ``plural``, which those that end otherwise need, an s."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def printable(text: str) -> str:
    """``text`` in one line, without what a terminal, a log or a page would obey.

    What servers, entries and files say was written by others: escape sequences, control characters
    of both kinds, marks that turn the direction of writing, new lines that forge a line of ours.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def printable_lines(text: str) -> str:
    """The same of a text of several lines: only for one whose lines are ours."""
    return "\n".join(map(printable, text.split("\n")))


def may_be_a_key(text: str) -> bool:
    """Whether ``text`` looks like a key, or has one in it: no message repeats it."""
    if _KEY.search(text):
        return True
    import base64

    try:
        return len(base64.b64decode(text.strip(), validate=True)) >= _KEY_BYTES
    except ValueError:
        return False
