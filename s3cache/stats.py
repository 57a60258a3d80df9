"""What a cache counts and tells: records of what happened, and who is told of transfers.

Every other part of the storage engine may use these records; this module uses none of them.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from s3cache._logs import logger_of

__all__ = [
    "CacheStats",
    "Counters",
    "Histogram",
    "HistogramSnapshot",
    "Level",
    "LevelStats",
    "Listener",
    "Listeners",
    "Meter",
    "Reason",
    "Step",
    "TierName",
    "TransferEvent",
    "Usage",
    "Verb",
    "VerbStats",
]

TierName: TypeAlias = Literal["local", "remote"]
#: Whole graphs, as AOTAutograd has them; what Inductor makes of a forward or backward of one; which
#: sizes of a program change. Entries are of these kinds, and counted by them.
Level: TypeAlias = Literal["aot", "fx", "shapes"]
Verb: TypeAlias = Literal["get", "get_range", "head", "put", "delete", "list", "atomic_create"]
Step: TypeAlias = Literal["queued", "started", "done", "absent", "retried", "failed"]

# Bucket 0 holds what is below 1 µs, bucket i the range [2**(i-1), 2**i) µs: 40 of them reach
# past three days, and the last one takes the rest.
_BUCKETS = 40
_BUCKET_S = 1e-6


logger = logger_of("storage")


class Reason(str, Enum):
    """Why a lookup missed, or why an entry was not saved.

    ``docs/reasons.md`` has a section on each, with what to do about it.

    Attributes:
        text: the same in words.
    """

    text: str

    ABSENT = "absent", "no entry has been saved under this key"
    GUARD = "guard", "no entry under this key has guards on sizes or memory that hold here"
    CORRUPT = "corrupt", "the entry was damaged or could not be used, and was set aside"
    UNTRUSTED = "untrusted", "no entry under this key is signed by a signer that is trusted here"
    TIMEOUT = "timeout", "the remote did not answer within lookup_timeout_s"
    UNAVAILABLE = "unavailable", "the store could not be reached"
    DENIED = "denied", "credentials are missing, or not allowed to do it"
    FULL = "full", "there was no room on the disk or in the queue of uploads"
    MACHINE = "machine", "this machine had no room, memory or file descriptors for it"
    DEVICE = "device", "the driver of the accelerator would not load its kernels"
    RANKS = "ranks", "another rank of the job missed, and all ranks compile together"
    DISABLED = "disabled", "the mode does not allow it"
    FORCED = "forced", "recache=True asks to compile again"
    ERROR = "error", "s3cache made a mistake: its log has more"

    def __new__(cls, code: str, text: str) -> Reason:
        """Return the member that is equal to its code."""
        member = str.__new__(cls, code)
        member._value_ = code
        member.text = text
        return member

    def __str__(self) -> str:
        return str(self.value)


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


@dataclass(frozen=True, slots=True)
class Usage:
    """What a directory holds: bytes of all objects together, and how many there are."""

    bytes: int
    files: int


@dataclass(frozen=True, slots=True)
class VerbStats:
    """One verb of a store, as it stood at one moment.

    Attributes:
        calls: calls that ended, well or not. A listing is one call, however long.
        errors: how many of them raised, by the error's class name; ``CancelledError`` too.
        bytes_in: bytes that came from the store.
        bytes_out: bytes that were written to it.
        latency: seconds spent waiting for the store; for a listing, without its consumer's time.
    """

    calls: int = 0
    errors: Mapping[str, int] = field(default_factory=dict)
    bytes_in: int = 0
    bytes_out: int = 0
    latency: HistogramSnapshot = field(default_factory=HistogramSnapshot)


@dataclass(frozen=True, slots=True)
class TransferEvent:
    """One step of one transfer.

    Attributes:
        direction: ``upload`` or ``download``.
        step: ``queued`` and ``started`` come before it ends; it ends as ``done``, ``absent``
            (there is nothing to transfer) or ``failed``. An upload that is tried again after a
            pause is ``retried``, and ``started`` anew; a prefetched object that proves too large
            for the memory left is ``started`` anew too.
        name: the object.
        size: its bytes as far as known, else 0.
        error: why it failed or is retried.
    """

    direction: Literal["upload", "download"]
    step: Step
    name: str
    size: int = 0
    error: Exception | None = None


Listener: TypeAlias = Callable[[TransferEvent], None]


class Listeners:
    """Calls every listener with every event, on the thread where it happens."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._listeners: tuple[Listener, ...] = ()

    def add(self, listener: Listener) -> Callable[[], None]:
        """Returns a function that removes the listener again."""
        with self._mutex:
            self._listeners = (*self._listeners, listener)
        return lambda: self._remove(listener)

    def emit(self, event: TransferEvent) -> None:
        for listener in self._listeners:
            try:
                listener(event)
            except Exception:
                # A progress bar that breaks must not take a transfer with it.
                logger.exception("a transfer listener failed and is removed")
                self._remove(listener)

    def _remove(self, listener: Listener) -> None:
        with self._mutex:
            self._listeners = tuple(kept for kept in self._listeners if kept is not listener)


@dataclass(frozen=True, slots=True)
class LevelStats:
    """What became of lookups at the second level, which is asked where the first cannot serve.

    Attributes:
        hits: lookups that hit, by tier.
        misses: lookups that missed, by reason.
        saved: entries accepted.
        superseded: how many of those were taken back unshared, for an entry of the whole graph.
        bypassed: graphs that were not looked up because they cannot be cached here either.
        bypass_reasons: how many of them for which reason; a graph may have several.
        refused: entries that were not used for whose they are, by cause.
    """

    hits: Mapping[TierName, int] = field(default_factory=dict)
    misses: Mapping[Reason, int] = field(default_factory=dict)
    saved: int = 0
    superseded: int = 0
    bypassed: int = 0
    bypass_reasons: Mapping[str, int] = field(default_factory=dict)
    refused: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts since the cache was opened (in a forked child: since the fork).

    Lookups and saves are those of whole graphs; ``fx`` has those of the second level. What is
    transferred is counted together.

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
        refused: entries that were not used for whose they are, by cause: see
            :data:`s3cache.trust.Cause`.
        bypassed: graphs that were not looked up because they cannot be cached.
        bypass_reasons: how many of them for which reason; a graph may have several.
        time_saved_s: seconds that compiling what was hit took where it was compiled.
        local: what the local tier holds; ``None`` without one.
        pending: uploads queued or under way, as far as this process knows.
        breaker: state of the circuit breaker before the remote: ``closed``, ``open``,
            ``half-open``; ``none`` without a remote.
        remote: requests to the remote store by verb, single attempts.
        fx: the second level, Inductor's FX graphs.
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
    refused: Mapping[str, int] = field(default_factory=dict)
    local: Usage | None = None
    pending: int = 0
    breaker: str = "none"
    remote: Mapping[Verb, VerbStats] = field(default_factory=dict)
    fx: LevelStats = field(default_factory=LevelStats)

    @property
    def lookups(self) -> int:
        return sum(self.hits.values()) + sum(self.misses.values())

    def in_numbers(self) -> dict[str, Any]:
        """The same as :meth:`in_words` for programs, by the names that attributes have here."""
        return {
            "hits": dict(self.hits),
            "misses": dict(self.misses),
            "bypassed": self.bypassed,
            "bypass_reasons": dict(self.bypass_reasons),
            "saved": self.saved,
            "uploaded": self.uploaded,
            "pending": self.pending,
            "refused": dict(Counter(self.refused) + Counter(self.fx.refused)),
            "second_level": {"hits": dict(self.fx.hits), "saved": self.fx.saved},
            "time_saved_s": round(self.time_saved_s, 3),
        }

    def in_words(self) -> str:
        """One line for people: what hit, missed and was bypassed, and what was shared."""
        refused = Counter(self.refused) + Counter(self.fx.refused)
        # Of halves that the whole graph has replaced nothing is left, and nothing uploaded.
        shared = self.fx.saved - self.fx.superseded
        halves = _counted("hit at the second level", _named(self.fx.hits))
        if not (self.lookups or self.bypassed or sum(self.fx.hits.values())):
            return "nothing was looked up in this process"
        parts = [
            _counted("hit", _named(self.hits)),
            _counted("missed", _named(self.misses)),
            _counted("bypassed", self.bypass_reasons, self.bypassed),
            *([halves] if any(self.fx.hits.values()) else []),
            *([_counted("not trusted", refused)] if refused else []),
            f"{self.saved} saved",
            *([f"{shared} saved at the second level"] if shared > 0 else []),
            f"{self.uploaded} uploaded",
        ]
        return f"{', '.join(parts)}; {self.time_saved_s:.1f} s of compiling spared"


def _named(counts: Mapping[TierName, int] | Mapping[Reason, int]) -> dict[str, int]:
    return {str(name): count for name, count in counts.items()}


def _counted(what: str, by_name: Mapping[str, int], total: int | None = None) -> str:
    """``3 hit (1 local, 2 remote)``; without the names where there are none."""
    names = ", ".join(f"{count} {name}" for name, count in sorted(by_name.items()) if count)
    total = sum(by_name.values()) if total is None else total
    return f"{total} {what}" + (f" ({names})" if names else "")


_NOTHING = LevelStats()


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

    def bypassed(self, reasons: Iterable[str]) -> None:
        self._add(
            ("bypassed", None, 1), *(("bypass_reasons", reason, 1) for reason in set(reasons))
        )

    def time_saved(self, seconds: float) -> None:
        with self._mutex:
            self._time_saved_s += seconds

    def saved(self, size: int, seconds: float) -> None:
        self._add(("saved", None, 1), ("saved_bytes", None, size))
        self._save_latency.record(seconds)

    def not_saved(self, reason: Reason, seconds: float) -> None:
        self._add(("not_saved", reason, 1))
        self._save_latency.record(seconds)

    def transferred(self, event: TransferEvent) -> None:
        """Count what was uploaded or downloaded; a :data:`Listener`."""
        if event.step == "done":
            name = "uploaded" if event.direction == "upload" else "downloaded"
            self._add((name, None, 1), (f"{name}_bytes", None, event.size))

    def upload_failed(self) -> None:
        self._add(("upload_failures", None, 1))

    def superseded(self) -> None:
        self._add(("superseded", None, 1))

    def set_aside(self, tier: TierName) -> None:
        self._add(("set_aside", tier, 1))

    def refused(self, cause: str) -> None:
        self._add(("refused", cause, 1))

    def level(self) -> LevelStats:
        """The lookups and saves alone."""
        counts = _Counts(self._copied())
        return LevelStats(
            hits=counts.by_tier("hits"),
            misses=counts.by_reason("misses"),
            saved=counts.total("saved"),
            superseded=counts.total("superseded"),
            bypassed=counts.total("bypassed"),
            bypass_reasons=counts.by_label("bypass_reasons"),
            refused=counts.by_label("refused"),
        )

    def _copied(self) -> Counter[tuple[str, object]]:
        with self._mutex:
            return Counter(self._counts)

    def snapshot(
        self,
        *,
        local: Usage | None,
        pending: int,
        breaker: str,
        remote: Mapping[Verb, VerbStats],
        fx: LevelStats = _NOTHING,
    ) -> CacheStats:
        counts = _Counts(self._copied())
        return CacheStats(
            hits=counts.by_tier("hits"),
            misses=counts.by_reason("misses"),
            saved=counts.total("saved"),
            not_saved=counts.by_reason("not_saved"),
            uploaded=counts.total("uploaded"),
            upload_failures=counts.total("upload_failures"),
            downloaded=counts.total("downloaded"),
            hit_bytes=counts.by_tier("hit_bytes"),
            saved_bytes=counts.total("saved_bytes"),
            uploaded_bytes=counts.total("uploaded_bytes"),
            downloaded_bytes=counts.total("downloaded_bytes"),
            hit_latency=MappingProxyType(
                {tier: histogram.snapshot() for tier, histogram in self._hit_latency.items()}
            ),
            miss_latency=self._miss_latency.snapshot(),
            save_latency=self._save_latency.snapshot(),
            set_aside=counts.by_tier("set_aside"),
            bypassed=counts.total("bypassed"),
            bypass_reasons=counts.by_label("bypass_reasons"),
            time_saved_s=self._time_saved_s,
            refused=counts.by_label("refused"),
            local=local,
            pending=pending,
            breaker=breaker,
            remote=remote,
            fx=fx,
        )


class _Counts:
    """One moment's counts, as they are shown."""

    def __init__(self, counts: Counter[tuple[str, object]]) -> None:
        self._counts = counts

    def total(self, name: str) -> int:
        return self._counts[name, None]

    def by_tier(self, name: str) -> Mapping[TierName, int]:
        tiers: tuple[TierName, ...] = ("local", "remote")
        return MappingProxyType({tier: self._counts[name, tier] for tier in tiers})

    def by_reason(self, name: str) -> Mapping[Reason, int]:
        found = {reason: self._counts[name, reason] for reason in Reason}
        return MappingProxyType({reason: count for reason, count in found.items() if count})

    def by_label(self, name: str) -> Mapping[str, int]:
        return MappingProxyType(
            {str(label): count for (each, label), count in self._counts.items() if each == name}
        )


class Meter:
    """The running counts behind :class:`VerbStats`; any thread may add to them."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._calls = 0
        self._errors: Counter[str] = Counter()
        self._bytes_in = 0
        self._bytes_out = 0
        self._latency = Histogram()

    def record(self, seconds: float, bytes_in: int, error: str | None) -> None:
        """Count a call that ended, with the name of its error if it raised one."""
        with self._mutex:
            self._calls += 1
            self._bytes_in += bytes_in
            self._latency.record(seconds)
            if error is not None:
                self._errors[error] += 1

    def add_bytes_out(self, size: int) -> None:
        """Count what a call has written."""
        with self._mutex:
            self._bytes_out += size

    def snapshot(self) -> VerbStats:
        """All so far, consistent in itself."""
        with self._mutex:
            return VerbStats(
                self._calls,
                MappingProxyType(dict(self._errors)),
                self._bytes_in,
                self._bytes_out,
                self._latency.snapshot(),
            )
