"""Counters of a cache, and the records of events that all rooms share."""

from __future__ import annotations

import math
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from s3cache.util.logs import logger_of

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
#: The kinds of entries, which are counted apart: whole graphs as AOTAutograd has them, Inductor's
#: FX graphs of one forward or backward, and the dynamic sizes of a program.
Level: TypeAlias = Literal["aot", "fx", "shapes"]
Verb: TypeAlias = Literal["get", "get_range", "head", "put", "delete", "list", "atomic_create"]
Step: TypeAlias = Literal["queued", "started", "done", "absent", "retried", "failed"]

# Bucket 0 counts durations below 1 µs, bucket i those in [2**(i-1), 2**i) µs. 40 buckets reach
# past three days; the last one takes everything longer.
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


# -- durations


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
        """Return the exact mean; 0 where nothing was recorded."""
        return self.total_s / self.count if self.count else 0.0

    def percentile(self, q: float) -> float:
        """Return about the duration in seconds that ``q`` percent (0 to 100) do not exceed.

        It is within a factor of two of the exact one, and never above ``max_s``; 0 where nothing
        was recorded.

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


class Histogram:
    """Record durations from any thread, in bounded memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total_s = 0.0
        self._max_s = 0.0
        self._buckets = [0] * _BUCKETS

    def record(self, seconds: float) -> None:
        """Count one duration; a negative one, as a clock set back gives, counts as 0."""
        seconds = max(seconds, 0.0)
        index = min(max(math.frexp(seconds / _BUCKET_S)[1], 0), _BUCKETS - 1)
        with self._lock:
            self._total_s += seconds
            self._max_s = max(self._max_s, seconds)
            self._buckets[index] += 1

    def snapshot(self) -> HistogramSnapshot:
        """Return all durations recorded so far, consistent in itself."""
        with self._lock:
            buckets = tuple(self._buckets)
            return HistogramSnapshot(sum(buckets), self._total_s, self._max_s, buckets)


# -- transfers


@dataclass(frozen=True, slots=True)
class TransferEvent:
    """One step of one transfer.

    Attributes:
        direction: ``upload`` or ``download``.
        step: ``queued``, then ``started``; the last step is ``done``, ``absent`` (there is nothing
            to transfer) or ``failed``. An upload that is tried again after a pause is ``retried``
            and then ``started`` again; so is a prefetched object too large for the memory left.
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
    """Call every listener with every event, on the thread where it happens."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._listeners: tuple[Listener, ...] = ()

    def add(self, listener: Listener) -> Callable[[], None]:
        """Add a listener, and return a function that removes it again."""
        with self._mutex:
            self._listeners = (*self._listeners, listener)
        return lambda: self._remove(listener)

    def emit(self, event: TransferEvent) -> None:
        """Call every listener; one that raises is removed, and the transfer goes on."""
        for listener in self._listeners:
            try:
                listener(event)
            except Exception:
                logger.exception("a transfer listener failed and is removed")
                self._remove(listener)

    def _remove(self, listener: Listener) -> None:
        with self._mutex:
            self._listeners = tuple(kept for kept in self._listeners if kept is not listener)


# -- what is counted


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes of all objects of a directory together, and how many there are."""

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
class LevelStats:
    """Lookups at the second level, which is asked where the first cannot serve.

    Attributes:
        hits: lookups that hit, by tier.
        misses: lookups that missed, by reason.
        saved: entries accepted.
        superseded: how many of those were taken back unshared, for an entry of the whole graph.
        bypassed: graphs that were not looked up because they cannot be cached here either.
        bypass_reasons: how many of them for which reason; a graph may have several.
        refused: entries that were not used because of their signatures, by cause.
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

    Lookups and saves are those of whole graphs; ``fx`` has those of the second level. Transfers of
    both are counted together.

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
        refused: entries that were not used because of their signatures, by cause: see
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
        """Return the counts of :meth:`in_words` as plain data, by the names of the attributes."""
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
        """Return one line for people: what hit, missed and was bypassed, and what was shared."""
        if not (self.lookups or self.bypassed or any(self.fx.hits.values())):
            return "nothing was looked up in this process"
        refused = Counter(self.refused) + Counter(self.fx.refused)
        # An entry of the second level that a whole graph superseded is gone, and not uploaded.
        shared = self.fx.saved - self.fx.superseded
        counts = [
            _count_in_words("hit", self.hits),
            _count_in_words("missed", self.misses),
            _count_in_words("bypassed", self.bypass_reasons, self.bypassed),
            any(self.fx.hits.values()) and _count_in_words("hit at the second level", self.fx.hits),
            refused and _count_in_words("not trusted", refused),
            f"{self.saved} saved",
            shared > 0 and f"{shared} saved at the second level",
            f"{self.uploaded} uploaded",
        ]
        shown = ", ".join(str(count) for count in counts if count)
        return f"{shown}; {self.time_saved_s:.1f} s of compiling spared"


def _count_in_words(what: str, by_name: Mapping[Any, int], total: int | None = None) -> str:
    """Return ``3 hit (1 local, 2 remote)``; without the names where there are none."""
    counts = sorted((str(name), count) for name, count in by_name.items() if count)
    names = ", ".join(f"{count} {name}" for name, count in counts)
    total = sum(by_name.values()) if total is None else total
    return f"{total} {what}" + (f" ({names})" if names else "")


# -- counting


class Counters:
    """The running counts behind :class:`CacheStats`; any thread may add to them.

    Each count has the name of its field, and the label that it is counted by, if the field is a
    mapping.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._counts: dict[tuple[str, str], float] = defaultdict(int)
        self._hit_latency: dict[TierName, Histogram] = {t: Histogram() for t in _TIERS}
        self._miss_latency = Histogram()
        self._save_latency = Histogram()

    def _add(self, *counts: tuple[str, str, float]) -> None:
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
        self._add(("bypassed", "", 1), *(("bypass_reasons", reason, 1) for reason in set(reasons)))

    def time_saved(self, seconds: float) -> None:
        self._add(("time_saved_s", "", seconds))

    def saved(self, size: int, seconds: float) -> None:
        self._add(("saved", "", 1), ("saved_bytes", "", size))
        self._save_latency.record(seconds)

    def not_saved(self, reason: Reason, seconds: float) -> None:
        self._add(("not_saved", reason, 1))
        self._save_latency.record(seconds)

    def transferred(self, event: TransferEvent) -> None:
        """Count what was uploaded or downloaded; a :data:`Listener`."""
        if event.step == "done":
            name = f"{event.direction}ed"
            self._add((name, "", 1), (f"{name}_bytes", "", event.size))

    def upload_failed(self) -> None:
        self._add(("upload_failures", "", 1))

    def superseded(self) -> None:
        self._add(("superseded", "", 1))

    def set_aside(self, tier: TierName) -> None:
        self._add(("set_aside", tier, 1))

    def refused(self, cause: str) -> None:
        self._add(("refused", cause, 1))

    def level(self) -> LevelStats:
        """Return the lookups and saves alone."""
        return LevelStats(**self._counts_of(LevelStats))

    def snapshot(self, **more: Any) -> CacheStats:
        """Return all counts.

        Args:
            more: the fields of :class:`CacheStats` that are not counted here.
        """
        latencies = {
            "hit_latency": MappingProxyType(
                {tier: histogram.snapshot() for tier, histogram in self._hit_latency.items()}
            ),
            "miss_latency": self._miss_latency.snapshot(),
            "save_latency": self._save_latency.snapshot(),
        }
        return CacheStats(**{**self._counts_of(CacheStats), **latencies, **more})

    def _counts_of(self, kind: type[LevelStats | CacheStats]) -> dict[str, Any]:
        """Return the counts of those fields of ``kind`` that have a type of :data:`_READ`."""
        with self._mutex:
            counts = dict(self._counts)
        by_field: dict[str, dict[str, float]] = defaultdict(dict)
        for (name, label), number in counts.items():
            by_field[name][label] = number
        return {
            each.name: _READ[str(each.type)](by_field[each.name])
            for each in fields(kind)
            if each.type in _READ
        }


_TIERS: tuple[TierName, ...] = ("local", "remote")
# How a field is made of its counts by label. There is a count for either tier, but for no reason
# that was never met.
_READ: dict[str, Callable[[dict[str, float]], Any]] = {
    "int": lambda counts: counts.get("", 0),
    "float": lambda counts: float(counts.get("", 0)),
    "Mapping[TierName, int]": lambda counts: MappingProxyType(
        {tier: counts.get(tier, 0) for tier in _TIERS}
    ),
    "Mapping[Reason, int]": lambda counts: MappingProxyType(
        {reason: counts[reason] for reason in Reason if reason in counts}
    ),
    "Mapping[str, int]": MappingProxyType,
}


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
        """Return all counts so far, consistent in themselves."""
        with self._mutex:
            return VerbStats(
                self._calls,
                MappingProxyType(dict(self._errors)),
                self._bytes_in,
                self._bytes_out,
                self._latency.snapshot(),
            )
