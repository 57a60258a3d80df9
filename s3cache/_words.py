"""Numbers with their nouns."""

from __future__ import annotations

__all__ = ["counted"]


def counted(number: int, noun: str, plural: str = "") -> str:
    """``1 entry``, ``2 entries``; without ``plural``, which those that end otherwise need, an s."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"
