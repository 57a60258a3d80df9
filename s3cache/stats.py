"""What a cache counts."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Literal, TypeAlias

from s3cache.metrics import Histogram, HistogramSnapshot
from s3cache.store._metered import Verb, VerbStats
from s3cache.tier import Usage

__all__ = ["CacheStats", "Counters", "Reason", "TierName"]

TierName: TypeAlias = Literal["local", "remote"]


class Reason(str, Enum):
    """Why a lookup missed, or why an entry was not saved."""

    ABSENT = "absent"  # nobody has saved it
    GUARD = "guard"  # there are entries, but the caller accepted none
    CORRUPT = "corrupt"  # the bytes were damaged or forged; they were set aside
    TIMEOUT = "timeout"  # no answer within the time a lookup may take
    UNAVAILABLE = "unavailable"  # the store cannot be reached, or not now
    DENIED = "denied"  # credentials are missing or not allowed to
    FULL = "full"  # no room on the disk or in the upload queue
    DISABLED = "disabled"  # the mode does not allow it
    FORCED = "forced"  # the user asked to compile anew
    ERROR = "error"  # a mistake in s3cache

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts since the cache was opened (in a forked child: since the fork).

    Attributes:
        hits: lookups that hit, by the tier that had the entry.
        misses: lookups that missed, by reason. Hits and misses together are all lookups.
        saved, not_saved: entries accepted, and refused by reason.
        uploaded, upload_failures: uploads finished, and attempts that failed.
        downloaded: objects fetched from the remote, for a lookup or by a prefetch, used or not.
        hit_bytes: sizes of the entries hit, by tier.
        saved_bytes, uploaded_bytes, downloaded_bytes: sizes of the frames.
        hit_latency, miss_latency, save_latency: seconds on the calling thread.
        set_aside: corrupt objects found, by tier.
        bypassed: graphs that were not looked up because they cannot be cached.
        bypass_reasons: how many of them for which reason; a graph may have several.
        time_saved_s: seconds that compiling what was hit took where it was compiled.
        local: what the local tier holds; ``None`` without one.
        pending: uploads queued or under way, as far as this process knows.
        breaker: state of the circuit breaker before the remote: ``closed``, ``open``,
            ``half-open``; ``none`` without a remote.
        remote: requests to the remote store by verb, single attempts.
    """

    hits: Mapping[TierName, int]
    misses: Mapping[Reason, int]
    saved: int
    not_saved: Mapping[Reason, int]
    uploaded: int
    upload_failures: int
    downloaded: int
    hit_bytes: Mapping[TierName, int]
    saved_bytes: int
    uploaded_bytes: int
    downloaded_bytes: int
    hit_latency: Mapping[TierName, HistogramSnapshot]
    miss_latency: HistogramSnapshot
    save_latency: HistogramSnapshot
    set_aside: Mapping[TierName, int]
    bypassed: int = 0
    bypass_reasons: Mapping[str, int] = field(default_factory=dict)
    time_saved_s: float = 0.0
    local: Usage | None = None
    pending: int = 0
    breaker: str = "none"
    remote: Mapping[Verb, VerbStats] = field(default_factory=dict)

    @property
    def lookups(self) -> int:
        return sum(self.hits.values()) + sum(self.misses.values())


class Counters:
    """The running counts behind :class:`CacheStats`; any thread may add to them."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._counts: Counter[tuple[str, object]] = Counter()
        self._time_saved_s = 0.0
        self._hit_latency: dict[TierName, Histogram] = {
            "local": Histogram(),
            "remote": Histogram(),
        }
        self._miss_latency = Histogram()
        self._save_latency = Histogram()

    def _add(self, *counts: tuple[str, object, int]) -> None:
        with self._mutex:
            for name, label, number in counts:
                self._counts[name, label] += number

    def hit(self, tier: TierName, size: int, seconds: float) -> None:
        self._add(("hits", tier, 1), ("hit_bytes", tier, size))
        self._hit_latency[tier].record(seconds)

    def miss(self, reason: Reason, seconds: float) -> None:
        self._add(("misses", reason, 1))
        self._miss_latency.record(seconds)

    def taken_back(self, tier: TierName, size: int, reason: Reason) -> None:
        """What was counted as a hit is a miss; its latency stays among the hits'."""
        self._add(("hits", tier, -1), ("hit_bytes", tier, -size), ("misses", reason, 1))

    def bypassed(self, reasons: Iterable[str]) -> None:
        self._add(("bypassed", None, 1), *(("bypass_reasons", each, 1) for each in set(reasons)))

    def time_saved(self, seconds: float) -> None:
        with self._mutex:
            self._time_saved_s += seconds

    def saved(self, size: int, seconds: float) -> None:
        self._add(("saved", None, 1), ("saved_bytes", None, size))
        self._save_latency.record(seconds)

    def not_saved(self, reason: Reason, seconds: float) -> None:
        self._add(("not_saved", reason, 1))
        self._save_latency.record(seconds)

    def uploaded(self, size: int) -> None:
        self._add(("uploaded", None, 1), ("uploaded_bytes", None, size))

    def upload_failed(self) -> None:
        self._add(("upload_failures", None, 1))

    def downloaded(self, size: int) -> None:
        self._add(("downloaded", None, 1), ("downloaded_bytes", None, size))

    def set_aside(self, tier: TierName) -> None:
        self._add(("set_aside", tier, 1))

    def snapshot(
        self,
        *,
        local: Usage | None,
        pending: int,
        breaker: str,
        remote: Mapping[Verb, VerbStats],
    ) -> CacheStats:
        with self._mutex:
            counts = Counter(self._counts)
            time_saved_s = self._time_saved_s

        def total(name: str) -> int:
            return counts[name, None]

        tiers: tuple[TierName, ...] = ("local", "remote")

        def by_tier(name: str) -> Mapping[TierName, int]:
            return MappingProxyType({tier: counts[name, tier] for tier in tiers})

        def by_reason(name: str) -> Mapping[Reason, int]:
            found = {reason: counts[name, reason] for reason in Reason}
            return MappingProxyType({reason: count for reason, count in found.items() if count})

        bypasses = {
            str(label): count for (name, label), count in counts.items() if name == "bypass_reasons"
        }
        return CacheStats(
            hits=by_tier("hits"),
            misses=by_reason("misses"),
            saved=total("saved"),
            not_saved=by_reason("not_saved"),
            uploaded=total("uploaded"),
            upload_failures=total("upload_failures"),
            downloaded=total("downloaded"),
            hit_bytes=by_tier("hit_bytes"),
            saved_bytes=total("saved_bytes"),
            uploaded_bytes=total("uploaded_bytes"),
            downloaded_bytes=total("downloaded_bytes"),
            hit_latency=MappingProxyType(
                {tier: histogram.snapshot() for tier, histogram in self._hit_latency.items()}
            ),
            miss_latency=self._miss_latency.snapshot(),
            save_latency=self._save_latency.snapshot(),
            set_aside=by_tier("set_aside"),
            bypassed=total("bypassed"),
            bypass_reasons=MappingProxyType(bypasses),
            time_saved_s=time_saved_s,
            local=local,
            pending=pending,
            breaker=breaker,
            remote=remote,
        )
