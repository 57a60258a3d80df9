"""A clock that only tests advance."""

from __future__ import annotations


class FakeClock:
    """A monotonic clock, in seconds."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
