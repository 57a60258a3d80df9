"""The metrics by themselves: their names, units and meanings, and how they come of the counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

from s3cache.cache import latest

if TYPE_CHECKING:
    from s3cache.stats import CacheStats, HistogramSnapshot, TierName

__all__ = ["FAMILIES", "Family", "Sample", "Source", "families", "latest_counts"]

#: Gives the counts of a moment; ``None`` where no cache has been enabled yet.
Source: TypeAlias = "Callable[[], CacheStats | None]"

# A reason or a tier is one, too.
_Name = TypeVar("_Name", bound=str)

_TIERS: tuple[TierName, ...] = ("local", "remote")
_BREAKERS = ("closed", "half-open", "open")
# Of the power-of-two buckets, those from 64 µs to a minute or so; the others are in the next.
_FIRST_BUCKET, _LAST_BUCKET, _BUCKET_S = 6, 26, 1e-6


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a family.

    Attributes:
        labels: what tells it from the others of its family.
        value: the count or the amount; of a histogram the sum of what was recorded, in seconds.
        buckets: of a histogram, how many were at most so many seconds long, for rising bounds; the
            last bound is infinite.
    """

    labels: Mapping[str, str]
    value: float
    buckets: tuple[tuple[float, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Family:
    """One metric.

    Attributes:
        name: in the words of OpenTelemetry, with dots and without unit.
        kind: a counter never falls.
        unit: by UCUM, as OpenTelemetry has it: ``s``, ``By``, or ``{entry}`` for what is counted.
        text: what it counts, for people.
        labels: the names of its samples' labels.
        read: its samples at a moment.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    text: str
    labels: tuple[str, ...]
    read: Callable[[CacheStats], Iterable[Sample]]

    @property
    def prometheus_name(self) -> str:
        """With underscores and the unit; a counter's samples get ``_total`` besides.

        See https://prometheus.io/docs/practices/naming/.
        """
        units = {"s": "_seconds", "By": "_bytes"}
        name = self.name.replace(".", "_")
        unit = units.get(self.unit, "")
        return name if name.endswith(unit) else name + unit


def latest_counts() -> CacheStats | None:
    """The counts of the cache that was enabled last, also where it is off again."""
    cache = latest()
    return None if cache is None else cache.stats()


def families(stats: CacheStats) -> list[tuple[Family, list[Sample]]]:
    """Every metric, with what ``stats`` says of it."""
    return [(family, [*family.read(stats)]) for family in FAMILIES]


def _levels(of: Callable[[CacheStats, str], Iterable[Sample]]) -> Callable[..., Iterable[Sample]]:
    return lambda stats: [sample for level in ("aot", "fx") for sample in of(stats, level)]


def _by(label: str, counts: Mapping[_Name, int], **more: str) -> list[Sample]:
    return [Sample({**more, label: str(name)}, count) for name, count in counts.items()]


def _hits(stats: CacheStats, level: str) -> list[Sample]:
    counts = stats.hits if level == "aot" else stats.fx.hits
    return _by("tier", {tier: counts.get(tier, 0) for tier in _TIERS}, level=level)


def _misses(stats: CacheStats, level: str) -> list[Sample]:
    return _by("reason", stats.misses if level == "aot" else stats.fx.misses, level=level)


def _bypassed(stats: CacheStats, level: str) -> list[Sample]:
    return [Sample({"level": level}, stats.bypassed if level == "aot" else stats.fx.bypassed)]


def _bypass_reasons(stats: CacheStats, level: str) -> list[Sample]:
    reasons = stats.bypass_reasons if level == "aot" else stats.fx.bypass_reasons
    return _by("reason", reasons, level=level)


def _refused(stats: CacheStats, level: str) -> list[Sample]:
    return _by("cause", stats.refused if level == "aot" else stats.fx.refused, level=level)


def _saved(stats: CacheStats, level: str) -> list[Sample]:
    return [Sample({"level": level}, stats.saved if level == "aot" else stats.fx.saved)]


def _single(value: Callable[[CacheStats], float]) -> Callable[[CacheStats], Iterable[Sample]]:
    return lambda stats: [Sample({}, value(stats))]


def _by_tier(
    counts: Callable[[CacheStats], Mapping[TierName, int]],
) -> Callable[[CacheStats], Iterable[Sample]]:
    return lambda stats: _by("tier", counts(stats))


def _local(attribute: str) -> Callable[[CacheStats], Iterable[Sample]]:
    return lambda stats: (
        [] if stats.local is None else [Sample({}, getattr(stats.local, attribute))]
    )


def _breaker(stats: CacheStats) -> Iterable[Sample]:
    return [Sample({"state": state}, float(stats.breaker == state)) for state in _BREAKERS]


def _histogram(recorded: HistogramSnapshot, **labels: str) -> Sample:
    buckets: list[tuple[float, int]] = []
    below = 0
    for index, count in enumerate(recorded.buckets):
        below += count
        if _FIRST_BUCKET <= index <= _LAST_BUCKET:
            buckets.append((math.ldexp(_BUCKET_S, index), below))
    return Sample(labels, recorded.total_s, (*buckets, (math.inf, recorded.count)))


def _requests(stats: CacheStats) -> Iterable[Sample]:
    return [_histogram(verb.latency, verb=name) for name, verb in stats.remote.items()]


def _request_errors(stats: CacheStats) -> Iterable[Sample]:
    return [
        sample
        for name, verb in stats.remote.items()
        for sample in _by("error", verb.errors, verb=name)
    ]


def _request_bytes(stats: CacheStats) -> Iterable[Sample]:
    for name, verb in stats.remote.items():
        yield Sample({"verb": name, "direction": "in"}, verb.bytes_in)
        yield Sample({"verb": name, "direction": "out"}, verb.bytes_out)


#: All metrics there are.
FAMILIES: tuple[Family, ...] = (
    Family(
        "s3cache.hits",
        "counter",
        "{lookup}",
        "Lookups that hit: whole graphs (aot), and halves of graphs (fx).",
        ("level", "tier"),
        _levels(_hits),
    ),
    Family(
        "s3cache.misses",
        "counter",
        "{lookup}",
        "Lookups that missed, by reason.",
        ("level", "reason"),
        _levels(_misses),
    ),
    Family(
        "s3cache.bypassed",
        "counter",
        "{graph}",
        "Graphs that were not looked up because they cannot be cached.",
        ("level",),
        _levels(_bypassed),
    ),
    Family(
        "s3cache.bypass.reasons",
        "counter",
        "{graph}",
        "Graphs that cannot be cached, by reason; one may have several.",
        ("level", "reason"),
        _levels(_bypass_reasons),
    ),
    Family(
        "s3cache.refused",
        "counter",
        "{entry}",
        "Entries that were not trusted, by cause.",
        ("level", "cause"),
        _levels(_refused),
    ),
    Family(
        "s3cache.compile.saved",
        "counter",
        "s",
        "Seconds that compiling what was hit took where it was compiled.",
        (),
        _single(lambda stats: stats.time_saved_s),
    ),
    Family(
        "s3cache.saved",
        "counter",
        "{entry}",
        "Entries accepted to be kept and shared.",
        ("level",),
        _levels(_saved),
    ),
    Family(
        "s3cache.not_saved",
        "counter",
        "{entry}",
        "Entries that could not be saved, by reason.",
        ("reason",),
        lambda stats: _by("reason", stats.not_saved),
    ),
    Family(
        "s3cache.uploads",
        "counter",
        "{object}",
        "Uploads that finished.",
        (),
        _single(lambda stats: stats.uploaded),
    ),
    Family(
        "s3cache.upload.failures",
        "counter",
        "{attempt}",
        "Attempts to upload that failed; what failed is tried again.",
        (),
        _single(lambda stats: stats.upload_failures),
    ),
    Family(
        "s3cache.uploads.pending",
        "gauge",
        "{object}",
        "Uploads queued or under way.",
        (),
        _single(lambda stats: stats.pending),
    ),
    Family(
        "s3cache.downloads",
        "counter",
        "{object}",
        "Objects fetched from the remote.",
        (),
        _single(lambda stats: stats.downloaded),
    ),
    Family(
        "s3cache.hit.size",
        "counter",
        "By",
        "Sizes of the entries that were hit.",
        ("tier",),
        _by_tier(
            lambda stats: {tier: stats.hit_bytes.get(tier, 0) for tier in ("local", "remote")}
        ),
    ),
    Family(
        "s3cache.upload.size",
        "counter",
        "By",
        "What was uploaded.",
        (),
        _single(lambda stats: stats.uploaded_bytes),
    ),
    Family(
        "s3cache.download.size",
        "counter",
        "By",
        "What was downloaded.",
        (),
        _single(lambda stats: stats.downloaded_bytes),
    ),
    Family(
        "s3cache.set_aside",
        "counter",
        "{entry}",
        "Corrupt entries that were found, by tier.",
        ("tier",),
        _by_tier(lambda stats: stats.set_aside),
    ),
    Family(
        "s3cache.local.size",
        "gauge",
        "By",
        "What the local tier holds, for all processes of this machine.",
        (),
        _local("bytes"),
    ),
    Family(
        "s3cache.local.files",
        "gauge",
        "{file}",
        "Files that the local tier holds, for all processes of this machine.",
        (),
        _local("files"),
    ),
    Family(
        "s3cache.breaker",
        "gauge",
        "{state}",
        "1 for the state that the circuit breaker before the remote is in.",
        ("state",),
        _breaker,
    ),
    Family(
        "s3cache.hit.duration",
        "histogram",
        "s",
        "How long the compiling thread waited for a lookup that hit.",
        ("tier",),
        lambda stats: [
            _histogram(each, tier=str(tier)) for tier, each in stats.hit_latency.items()
        ],
    ),
    Family(
        "s3cache.miss.duration",
        "histogram",
        "s",
        "How long the compiling thread waited for a lookup that missed.",
        (),
        lambda stats: [_histogram(stats.miss_latency)],
    ),
    Family(
        "s3cache.save.duration",
        "histogram",
        "s",
        "How long the compiling thread waited for a save.",
        (),
        lambda stats: [_histogram(stats.save_latency)],
    ),
    Family(
        "s3cache.request.duration",
        "histogram",
        "s",
        "Single requests to the remote, by verb.",
        ("verb",),
        _requests,
    ),
    Family(
        "s3cache.request.errors",
        "counter",
        "{request}",
        "Requests to the remote that failed, by verb and kind of error.",
        ("verb", "error"),
        _request_errors,
    ),
    Family(
        "s3cache.request.size",
        "counter",
        "By",
        "What requests to the remote carried, by verb and direction.",
        ("verb", "direction"),
        _request_bytes,
    ),
)
