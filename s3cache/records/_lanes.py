"""What overlaps, side by side."""

from __future__ import annotations

__all__ = ["Lanes"]


class Lanes:
    """Gives each of many spans a lane in which no other one overlaps it.

    Spans may come in any order; in that of their beginning it takes as many lanes as there were
    spans at once.
    """

    def __init__(self) -> None:
        self._ends: list[float] = []  # by lane

    def take(self, began: float, ended: float) -> int:
        """The lane of a span, counted from 0."""
        free = next((lane for lane, end in enumerate(self._ends) if end <= began), len(self._ends))
        self._ends[free : free + 1] = [ended]
        return free
