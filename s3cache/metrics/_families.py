"""The metrics: their names, units and meanings, and the statistics that each is read from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from s3cache.cache import current_cache

if TYPE_CHECKING:
    from s3cache.stats import CacheStats, HistogramSnapshot

#: Gives the counts of a moment; ``None`` where no cache has been enabled yet.
Source: TypeAlias = "Callable[[], CacheStats | None]"

_BREAKERS = ("closed", "half-open", "open")
# Of the power-of-two buckets, those from 64 µs to about a minute; the next one has the others.
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
        """Return the name with underscores and the unit; a counter's samples also get ``_total``.

        See https://prometheus.io/docs/practices/naming/.
        """
        name = self.name.replace(".", "_")
        unit = {"s": "_seconds", "By": "_bytes"}.get(self.unit, "")
        return name if name.endswith(unit) else name + unit


def latest_counts() -> CacheStats | None:
    """Return the counts of the cache that was enabled last, also where it is off again."""
    cache = current_cache()
    return None if cache is None else cache.stats()


def families(stats: CacheStats) -> list[tuple[Family, list[Sample]]]:
    """Return every metric, with its samples in ``stats``."""
    return [(family, [*family.read(stats)]) for family in FAMILIES]


# -- reading samples from a field of the statistics

_Root: TypeAlias = "Callable[[CacheStats], object]"


def _whole(stats: CacheStats) -> object:
    return stats


def _by_level(stats: CacheStats) -> object:
    return {"aot": stats, "fx": stats.fx}


def _family(
    name: str,
    kind: Literal["counter", "gauge", "histogram"],
    unit: str,
    field: str,
    labels: str,
    text: str,
    root: _Root | None = None,
) -> Family:
    """Return the family of a field.

    Args:
        field: a path of attributes; each mapping on its way, and at its end, stands for a label.
        root: where the path begins: left out, at each level if the first label is one.
    """
    names = tuple(labels.split())
    begin = root or (_by_level if names[:1] == ("level",) else _whole)

    def read(stats: CacheStats) -> Iterator[Sample]:
        for keys, found in _walk(begin(stats), [*filter(None, field.split("."))]):
            of = dict(zip(names, keys, strict=True))
            yield _histogram(of, found) if kind == "histogram" else Sample(of, found)

    return Family(f"s3cache.{name}", kind, unit, text, names, read)


def _walk(
    found: object, path: list[str], keys: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield what a path leads to, with the keys of the mappings on its way."""
    if isinstance(found, Mapping):
        for key, value in found.items():
            yield from _walk(value, path, (*keys, str(key)))
    elif path and found is not None:
        yield from _walk(getattr(found, path[0]), path[1:], keys)
    elif found is not None:
        yield keys, found


def _histogram(labels: Mapping[str, str], recorded: HistogramSnapshot) -> Sample:
    buckets: list[tuple[float, int]] = []
    below = 0
    for index, count in enumerate(recorded.buckets):
        below += count
        if _FIRST_BUCKET <= index <= _LAST_BUCKET:
            buckets.append((math.ldexp(_BUCKET_S, index), below))
    return Sample(labels, recorded.total_s, (*buckets, (math.inf, recorded.count)))


def _breaker(stats: CacheStats) -> object:
    return {state: float(stats.breaker == state) for state in _BREAKERS}


def _request_bytes(stats: CacheStats) -> object:
    return {
        verb: {"in": found.bytes_in, "out": found.bytes_out} for verb, found in stats.remote.items()
    }


#: All metrics there are.
FAMILIES: tuple[Family, ...] = (
    _family("hits", "counter", "{lookup}", "hits", "level tier",
            "Lookups that hit: whole graphs (aot), and halves of graphs (fx)."),
    _family("misses", "counter", "{lookup}", "misses", "level reason",
            "Lookups that missed, by reason."),
    _family("bypassed", "counter", "{graph}", "bypassed", "level",
            "Graphs that were not looked up because they cannot be cached."),
    _family("bypass.reasons", "counter", "{graph}", "bypass_reasons", "level reason",
            "Graphs that cannot be cached, by reason; one may have several."),
    _family("refused", "counter", "{entry}", "refused", "level cause",
            "Entries that were not trusted, by cause."),
    _family("compile.saved", "counter", "s", "time_saved_s", "",
            "Seconds that compiling what was hit took where it was compiled."),
    _family("saved", "counter", "{entry}", "saved", "level",
            "Entries accepted to be kept and shared."),
    _family("not_saved", "counter", "{entry}", "not_saved", "reason",
            "Entries that could not be saved, by reason."),
    _family("uploads", "counter", "{object}", "uploaded", "",
            "Uploads that finished."),
    _family("upload.failures", "counter", "{attempt}", "upload_failures", "",
            "Attempts to upload that failed; what failed is tried again."),
    _family("uploads.pending", "gauge", "{object}", "pending", "",
            "Uploads queued or under way."),
    _family("downloads", "counter", "{object}", "downloaded", "",
            "Objects fetched from the remote."),
    _family("hit.size", "counter", "By", "hit_bytes", "tier",
            "Sizes of the entries that were hit."),
    _family("upload.size", "counter", "By", "uploaded_bytes", "",
            "What was uploaded."),
    _family("download.size", "counter", "By", "downloaded_bytes", "",
            "What was downloaded."),
    _family("set_aside", "counter", "{entry}", "set_aside", "tier",
            "Corrupt entries that were found, by tier."),
    _family("local.size", "gauge", "By", "local.bytes", "",
            "What the local tier holds, for all processes of this machine."),
    _family("local.files", "gauge", "{file}", "local.files", "",
            "Files that the local tier holds, for all processes of this machine."),
    _family("breaker", "gauge", "{state}", "", "state",
            "1 for the state that the circuit breaker before the remote is in.", _breaker),
    _family("hit.duration", "histogram", "s", "hit_latency", "tier",
            "How long the compiling thread waited for a lookup that hit."),
    _family("miss.duration", "histogram", "s", "miss_latency", "",
            "How long the compiling thread waited for a lookup that missed."),
    _family("save.duration", "histogram", "s", "save_latency", "",
            "How long the compiling thread waited for a save."),
    _family("request.duration", "histogram", "s", "remote.latency", "verb",
            "Single requests to the remote, by verb."),
    _family("request.errors", "counter", "{request}", "remote.errors", "verb error",
            "Requests to the remote that failed, by verb and kind of error."),
    _family("request.size", "counter", "By", "", "verb direction",
            "What requests to the remote carried, by verb and direction.", _request_bytes),
)  # fmt: skip
