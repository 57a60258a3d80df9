"""Durations counted in fixed memory: what happened how often, and about how long it took."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass

__all__ = ["Histogram", "HistogramSnapshot"]

# Bucket 0 holds what is below 1 µs, bucket i the range [2**(i-1), 2**i) µs: 40 of them reach
# past three days, and the last one takes the rest.
_BUCKETS = 40
_BUCKET_S = 1e-6


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """Durations as they stood at one moment.

    Attributes:
        count: durations recorded.
        total_s: their sum.
        max_s: the longest, exactly; 0 where there are none.
        buckets: how many fell into each power-of-two bucket.
    """

    count: int = 0
    total_s: float = 0.0
    max_s: float = 0.0
    buckets: tuple[int, ...] = (0,) * _BUCKETS

    @property
    def mean_s(self) -> float:
        """Exact; 0 where nothing was recorded."""
        return self.total_s / self.count if self.count else 0.0

    def percentile(self, q: float) -> float:
        """About the duration in seconds that ``q`` percent (0 to 100) do not exceed.

        Within a factor of two of the exact one, and never above ``max_s``; 0 where nothing was
        recorded.

        Raises:
            ValueError: ``q`` is outside 0 to 100.
        """
        if not 0 <= q <= 100:
            raise ValueError(f"percentile {q} is outside 0 to 100")
        rank = q * self.count / 100
        below = 0
        for index, count in enumerate(self.buckets):
            if count and below + count >= rank:
                low_s = 0.0 if index == 0 else math.ldexp(_BUCKET_S, index - 1)
                last = index == _BUCKETS - 1
                high_s = self.max_s if last else math.ldexp(_BUCKET_S, index)
                return min(low_s + (high_s - low_s) * (rank - below) / count, self.max_s)
            below += count
        return self.max_s

    def __add__(self, other: HistogramSnapshot) -> HistogramSnapshot:
        """Both taken together, as if one histogram had recorded all."""
        return HistogramSnapshot(
            self.count + other.count,
            self.total_s + other.total_s,
            max(self.max_s, other.max_s),
            tuple(a + b for a, b in zip(self.buckets, other.buckets, strict=True)),
        )


class Histogram:
    """Records durations from any thread, in memory that does not grow."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._total_s = 0.0
        self._max_s = 0.0
        self._buckets = [0] * _BUCKETS

    def record(self, seconds: float) -> None:
        """Count one duration; a negative one, as a clock set back gives, counts as 0."""
        seconds = max(seconds, 0.0)
        index = min(max(math.frexp(seconds / _BUCKET_S)[1], 0), _BUCKETS - 1)
        with self._lock:
            self._count += 1
            self._total_s += seconds
            self._max_s = max(self._max_s, seconds)
            self._buckets[index] += 1

    def snapshot(self) -> HistogramSnapshot:
        """All recorded so far, consistent in itself."""
        with self._lock:
            return HistogramSnapshot(self._count, self._total_s, self._max_s, tuple(self._buckets))
