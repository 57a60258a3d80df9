"""Counters of a cache, and the events that they count."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from s3cache.errors import Reason as Reason
from s3cache.seam import Feature, Notice, features

TierName: TypeAlias = Literal["local", "remote"]
#: The kind of an entry: AOTAutograd's whole graphs (``aot``), Inductor's FX graphs of a forward or
#: backward (``fx``), and the kinds of features.
EntryKind: TypeAlias = str
Verb: TypeAlias = Literal["get", "get_range", "head", "put", "delete", "list", "atomic_create"]
Step: TypeAlias = Literal["queued", "started", "done", "absent", "retried", "failed"]

# Bucket 0 counts durations below 1 µs, bucket i those in [2**(i-1), 2**i) µs. 40 buckets cover more
# than three days; the last one also counts longer durations.
_BUCKETS = 40
_BUCKET_S = 1e-6


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """A histogram of durations at one moment."""

    count: int = 0
    total_s: float = 0.0
    max_s: float = 0.0  # the longest duration, exactly; 0 if there are none
    buckets: tuple[int, ...] = (0,) * _BUCKETS  # durations in each power-of-two bucket

    def plus(self, seconds: float) -> HistogramSnapshot:
        """Add one duration; a negative one, after a clock was set back, counts as 0."""
        seconds, buckets = max(seconds, 0.0), [*self.buckets]
        buckets[min(max(math.frexp(seconds / _BUCKET_S)[1], 0), _BUCKETS - 1)] += 1
        total_s, max_s = self.total_s + seconds, max(self.max_s, seconds)
        return HistogramSnapshot(self.count + 1, total_s, max_s, tuple(buckets))


_NO_TIMES = HistogramSnapshot()


# -- transfers


@dataclass(frozen=True, slots=True)
class TransferEvent:
    """One step of one transfer.

    Attributes:
        step: ``queued``, then ``started``; the last step is ``done``, ``absent`` (there is nothing
            to transfer) or ``failed``. An upload that is retried after a pause is ``retried`` and
            then ``started`` again; so is a prefetched object that exceeds the free memory.
        name: the object.
        size: its size in bytes, or 0 if unknown.
        error: why it failed or is retried.
    """

    direction: Literal["upload", "download"]
    step: Step
    name: str
    size: int = 0
    error: Exception | None = None


Listener: TypeAlias = Callable[[TransferEvent], None]


class Listeners(Notice[[TransferEvent]]):
    """The listeners to transfers, which are called on the thread of the event."""

    def emit(self, *step: Any, **more: Any) -> None:
        """Call every listener with a :class:`TransferEvent`; one that raises is removed."""
        self.tell(TransferEvent(*step, **more))


# -- statistics


@dataclass(frozen=True, slots=True)
class Usage:
    """The total size in bytes of the objects in a directory, and their number."""

    bytes: int
    files: int

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.bytes + other.bytes, self.files + other.files)

    def __sub__(self, other: Usage) -> Usage:
        return Usage(self.bytes - other.bytes, self.files - other.files)


@dataclass(frozen=True, slots=True)
class VerbStats:
    """Statistics of one verb of a store, at one moment. Each page of a listing is one call."""

    calls: int = 0  # that ended, with or without an error
    errors: Mapping[str, int] = field(default_factory=dict)  # by class; ``CancelledError`` too
    bytes_in: int = 0  # read from the store
    bytes_out: int = 0
    latency: HistogramSnapshot = _NO_TIMES  # seconds spent waiting for the store


@dataclass(frozen=True, slots=True)
class _Lookups:
    """Lookups and saves at one level; see :class:`CacheStats`."""

    hits: Mapping[TierName, int] = field(default_factory=dict)
    misses: Mapping[Reason, int] = field(default_factory=dict)
    saved: int = 0
    bypassed: int = 0
    bypass_reasons: Mapping[str, int] = field(default_factory=dict)
    refused: Mapping[str, int] = field(default_factory=dict)

    @property
    def lookups(self) -> int:
        return sum(self.hits.values()) + sum(self.misses.values())


@dataclass(frozen=True, slots=True)
class LevelStats(_Lookups):
    """Lookups and saves at the second level, which is used if the first level has no entry."""

    contained: int = 0  # saved entries that are part of a saved whole graph; others may need them

    def in_words(self) -> str:
        """Return ``1 hit (1 remote), 2 missed (2 absent), 2 saved``."""
        hits, misses = _count_in_words("hit", self.hits), _count_in_words("missed", self.misses)
        return f"{hits}, {misses}, {self.saved} saved"


@dataclass(frozen=True, slots=True)
class CacheStats(_Lookups):
    """Counts since the cache was opened (in a forked child: since the fork).

    Lookups and saves are those of whole graphs; ``fx`` has those of the second level. Transfers of
    both levels are counted together.

    Attributes:
        hits, misses: lookups that hit, by tier, and lookups that missed, by reason.
        saved: entries that were accepted.
        bypassed, bypass_reasons: graphs that were not looked up because they cannot be cached, in
            all and by reason.
        refused: entries that were not used because of their signatures, by cause: see
            :data:`s3cache.trust.Cause`.
        not_saved: entries that were refused, by reason.
        uploaded, upload_failures: finished uploads, and failed attempts.
        downloaded: objects fetched from the remote by a lookup or a prefetch, used or not.
        hit_bytes: sizes of the entries hit, by tier.
        saved_bytes, uploaded_bytes, downloaded_bytes: sizes of the frames.
        hit_latency, miss_latency, save_latency: seconds on the calling thread.
        set_aside: corrupt objects found, by tier.
        time_saved_s: the time in seconds that compiling the hits took when they were compiled.
        local: usage of the local tier; ``None`` without one.
        pending: queued or running uploads, as far as this process knows.
        breaker: state of the circuit breaker before the remote: ``closed``, ``open``,
            ``half-open``; ``none`` without a remote.
        remote: requests to the remote store by verb; every attempt counts.
        fx: the second level, Inductor's FX graphs.
        kinds: lookups and saves of the entries of features, by kind, if there were any.
        features: what features count besides, by feature and name.
    """

    not_saved: Mapping[Reason, int] = field(default_factory=dict)
    uploaded: int = 0
    upload_failures: int = 0
    downloaded: int = 0
    hit_bytes: Mapping[TierName, int] = field(default_factory=dict)
    saved_bytes: int = 0
    uploaded_bytes: int = 0
    downloaded_bytes: int = 0
    hit_latency: Mapping[TierName, HistogramSnapshot] = field(default_factory=dict)
    miss_latency: HistogramSnapshot = _NO_TIMES
    save_latency: HistogramSnapshot = _NO_TIMES
    set_aside: Mapping[TierName, int] = field(default_factory=dict)
    time_saved_s: float = 0.0
    local: Usage | None = None
    pending: int = 0
    breaker: str = "none"
    remote: Mapping[Verb, VerbStats] = field(default_factory=dict)
    fx: LevelStats = LevelStats()
    kinds: Mapping[str, LevelStats] = field(default_factory=dict)
    features: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def in_numbers(self) -> dict[str, Any]:
        """Return the counts of :meth:`in_words` as plain data, by the names of the attributes."""
        names = ["hits", "misses", "bypassed", "bypass_reasons", "saved", "uploaded", "pending"]
        values = {name: getattr(self, name) for name in names}
        return {
            **{name: dict(of) if isinstance(of, dict) else of for name, of in values.items()},
            "refused": dict(Counter(self.refused) + Counter(self.fx.refused)),
            "second_level": {"hits": dict(self.fx.hits), "saved": self.fx.saved},
            "time_saved_s": round(self.time_saved_s, 3),
            **{name: dict(of) for name, of in self.features.items() if any(of.values())},
            **{kind: {"hits": dict(of.hits), "saved": of.saved} for kind, of in self.kinds.items()},
        }

    def in_words(self) -> str:
        """Return one line for people: hits, misses, bypasses, saves and uploads."""
        kinds = "".join(f"; {kind}: {of.in_words()}" for kind, of in self.kinds.items())
        words = {each.name: each.in_words(self.features.get(each.name, {})) for each in features()}
        more = "".join(f"; {text}" for text in words.values() if text)
        if not (self.lookups or self.bypassed or any(self.fx.hits.values()) or more):
            return f"{'no graph' if kinds else 'nothing'} was looked up in this process{kinds}"
        refused = Counter(self.refused) + Counter(self.fx.refused)
        shared = self.fx.saved - self.fx.contained  # those that whole graphs do not replace
        counts = [
            _count_in_words("hit", self.hits),
            _count_in_words("missed", self.misses),
            _count_in_words("bypassed", self.bypass_reasons, self.bypassed),
            any(self.fx.hits.values()) and _count_in_words("hit at the second level", self.fx.hits),
            refused and _count_in_words("not trusted", refused),
            f"{self.saved} saved",
            shared > 0 and f"{shared} saved at the second level",
            f"{self.uploaded} uploaded",
            self.pending and f"{self.pending} still to upload",
        ]
        shown = ", ".join(str(count) for count in counts if count)
        has_both = any(self.hits.values()) and self.misses.get(Reason.ABSENT)
        hint = "; `s3cache explain` says why graphs missed where others hit" if has_both else ""
        return f"{shown}{more}{kinds}; {self.time_saved_s:.1f} s of compiling spared{hint}"


def _count_in_words(what: str, by_name: Mapping[Any, int], total: int | None = None) -> str:
    """Return ``3 hit (1 local, 2 remote)``; without names if there are none."""
    counts = sorted((str(name), count) for name, count in by_name.items() if count)
    names = ", ".join(f"{count} {name}" for name, count in counts)
    total = sum(by_name.values()) if total is None else total
    return f"{total} {what}" + (f" ({names})" if names else "")


# -- counting

_Stats = TypeVar("_Stats", LevelStats, CacheStats, VerbStats)
_FIELDS = [*fields(LevelStats), *fields(CacheStats), *fields(VerbStats)]
_LABELLED = {each.name for each in _FIELDS if each.default_factory is dict}


class Counters:
    """The running counts behind a dataclass of statistics; any thread may add to them."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        # By field, then by label; "" if the field has no labels.
        self._counts: dict[str, dict[str, Any]] = {field.name: {} for field in _FIELDS}
        for tier in get_args(TierName):  # both tiers always have a count
            self.add(tier, hits=0, hit_bytes=0, set_aside=0)
            self._counts["hit_latency"][tier] = HistogramSnapshot()

    def add(self, label: str = "", /, **amounts: float) -> None:
        """Add to fields, by name; in mappings to the count of ``label``.

        An amount of a latency is one duration in seconds.
        """
        with self._mutex:
            for name, amount in amounts.items():
                counts, key = self._counts[name], label if name in _LABELLED else ""
                if name.endswith("latency"):
                    counts[key] = counts.get(key, _NO_TIMES).plus(amount)
                else:
                    counts[key] = counts.get(key, 0) + amount

    def read(self, of: type[_Stats], **more: Any) -> _Stats:
        """Return a consistent snapshot; ``more`` has fields that are not counted here."""
        with self._mutex:
            counts = {name: dict(labels) for name, labels in self._counts.items()}
        values: dict[str, Any] = {
            field.name: counts[field.name] if field.name in _LABELLED else counts[field.name][""]
            for field in fields(of)
            if counts[field.name]
        }
        return of(**values | more)


class FeatureCounters:
    """The running counts of a feature."""

    def __init__(self, feature: Feature) -> None:
        self._mutex = threading.Lock()
        self._counts: dict[str, float] = dict.fromkeys(feature.counts, 0)

    def count(self, name: str, label: str = "", number: float = 1) -> None:
        """Add to the count ``name``, and to that of its ``label``."""
        with self._mutex:
            for key in (name, f"{name}:{label}") if label else (name,):
                self._counts[key] = self._counts.get(key, 0) + number

    def snapshot(self) -> dict[str, float]:
        """Return all counts by name, those of labels as ``name:label``."""
        with self._mutex:
            return dict(self._counts)
