"""Export the counts of a process's cache to Prometheus and OpenTelemetry.

Their libraries are imported at the first use.
"""

from __future__ import annotations

import importlib
import itertools
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from s3cache.cache import current_cache
from s3cache.errors import ConfigError
from s3cache.seam import launch
from s3cache.util import __version__
from s3cache.util.logs import logger_of

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from prometheus_client.metrics_core import Metric

    from s3cache.cache import Cache
    from s3cache.stats import CacheStats

#: Returns the current counts; ``None`` if no cache has been enabled yet.
Source: TypeAlias = "Callable[[], CacheStats | None]"

# The power-of-two buckets from 64 µs to about a minute; the next one counts longer times.
_FIRST_BUCKET, _LAST_BUCKET, _BUCKET_S = 6, 26, 1e-6

logger = logger_of("metrics")


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a family; of a histogram, the sum of its observations, in seconds."""

    labels: Mapping[str, str]
    value: float
    # Of a histogram: numbers of observations up to rising bounds in seconds; the last is infinite.
    buckets: tuple[tuple[float, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Family:
    """One metric, named in OpenTelemetry's style: with dots and without unit.

    ``of`` returns its values: a number, or nested mappings, one for each label. If the first label
    is ``kind`` or ``verb``, it is called with the counts of each.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str  # by UCUM, like in OpenTelemetry: ``s``, ``By``, or ``{entry}`` for counts
    labels: tuple[str, ...]
    of: Callable[[Any], object]
    text: str

    @property
    def prometheus_name(self) -> str:
        """Return the name with underscores and the unit; a counter's samples also get ``_total``.

        See https://prometheus.io/docs/practices/naming/.
        """
        name = self.name.replace(".", "_")
        unit = {"s": "_seconds", "By": "_bytes"}.get(self.unit, "")
        return name if name.endswith(unit) else name + unit

    def read(self, stats: CacheStats) -> list[Sample]:
        """Return its samples in ``stats``."""
        parts: dict[str, Mapping[Any, Any]]
        parts = {"kind": {"aot": stats, "fx": stats.fx, **stats.kinds}, "verb": stats.remote}
        of = parts.get(self.labels[0]) if self.labels else None
        values = self.of(stats) if of is None else {k: self.of(v) for k, v in of.items()}
        samples = []
        for keys, value in _leaves(values):
            labels = dict(zip(self.labels, keys, strict=True))
            if isinstance(value, (int, float)):
                samples.append(Sample(labels, value))
                continue
            below = [*itertools.accumulate(value.buckets)]
            bounds = range(_FIRST_BUCKET, _LAST_BUCKET + 1)
            buckets = [(math.ldexp(_BUCKET_S, index), below[index]) for index in bounds]
            samples.append(Sample(labels, value.total_s, (*buckets, (math.inf, value.count))))
        return samples


def _leaves(tree: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the values in nested mappings, with their keys."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, (*keys, str(key)))
    elif tree is not None:
        yield keys, tree


def families(stats: CacheStats) -> list[tuple[Family, list[Sample]]]:
    """Return every metric, with its samples in ``stats``."""
    return [(family, family.read(stats)) for family in FAMILIES]


#: All metrics.
FAMILIES: tuple[Family, ...] = (
    Family("s3cache.hits", "counter", "{lookup}", ("kind", "tier"), lambda s: s.hits,
           "Lookups that hit: whole graphs (aot), FX graphs (fx), other compilers by name."),
    Family("s3cache.misses", "counter", "{lookup}", ("kind", "reason"), lambda s: s.misses,
           "Lookups that missed, by reason."),
    Family("s3cache.bypassed", "counter", "{graph}", ("kind",), lambda s: s.bypassed,
           "Graphs that were not looked up because they cannot be cached."),
    Family("s3cache.bypass.reasons", "counter", "{graph}", ("kind", "reason"),
           lambda s: s.bypass_reasons,
           "Graphs that cannot be cached, by reason; one may have several."),
    Family("s3cache.refused", "counter", "{entry}", ("kind", "cause"), lambda s: s.refused,
           "Entries that were not trusted, by cause."),
    Family("s3cache.compile.saved", "counter", "s", (), lambda s: s.time_saved_s,
           "Compile time in seconds that hits saved, as measured at the original compile."),
    Family("s3cache.saved", "counter", "{entry}", ("kind",), lambda s: s.saved,
           "Entries that were accepted."),
    Family("s3cache.not_saved", "counter", "{entry}", ("reason",), lambda s: s.not_saved,
           "Entries that could not be saved, by reason."),
    Family("s3cache.uploads", "counter", "{object}", (), lambda s: s.uploaded,
           "Finished uploads."),
    Family("s3cache.upload.failures", "counter", "{attempt}", (), lambda s: s.upload_failures,
           "Failed attempts to upload; they are tried again."),
    Family("s3cache.uploads.pending", "gauge", "{object}", (), lambda s: s.pending,
           "Queued or running uploads."),
    Family("s3cache.downloads", "counter", "{object}", (), lambda s: s.downloaded,
           "Objects fetched from the remote."),
    Family("s3cache.hit.size", "counter", "By", ("tier",), lambda s: s.hit_bytes,
           "Sizes of the entries that were hit."),
    Family("s3cache.upload.size", "counter", "By", (), lambda s: s.uploaded_bytes,
           "Sizes of the uploaded objects."),
    Family("s3cache.download.size", "counter", "By", (), lambda s: s.downloaded_bytes,
           "Sizes of the downloaded objects."),
    Family("s3cache.set_aside", "counter", "{entry}", ("tier",), lambda s: s.set_aside,
           "Corrupt entries that were found, by tier."),
    Family("s3cache.feature.events", "counter", "{event}", ("feature", "event"),
           lambda s: s.features,
           "What features count; see CacheStats.features."),
    Family("s3cache.local.size", "gauge", "By", (), lambda s: s.local and s.local.bytes,
           "Size of the local tier, of all processes of this machine."),
    Family("s3cache.local.files", "gauge", "{file}", (), lambda s: s.local and s.local.files,
           "Files in the local tier, of all processes of this machine."),
    Family("s3cache.breaker", "gauge", "{state}", ("state",),
           lambda s: {each: float(s.breaker == each) for each in ("closed", "half-open", "open")},
           "1 for the current state of the circuit breaker before the remote."),
    Family("s3cache.hit.duration", "histogram", "s", ("tier",), lambda s: s.hit_latency,
           "Time that a lookup that hit took on the compiling thread."),
    Family("s3cache.miss.duration", "histogram", "s", (), lambda s: s.miss_latency,
           "Time that a lookup that missed took on the compiling thread."),
    Family("s3cache.save.duration", "histogram", "s", (), lambda s: s.save_latency,
           "Time that a save took on the compiling thread."),
    Family("s3cache.request.duration", "histogram", "s", ("verb",), lambda s: s.latency,
           "Single requests to the remote, by verb."),
    Family("s3cache.request.errors", "counter", "{request}", ("verb", "error"), lambda s: s.errors,
           "Requests to the remote that failed, by verb and kind of error."),
    Family("s3cache.request.size", "counter", "By", ("verb", "direction"),
           lambda s: {"in": s.bytes_in, "out": s.bytes_out},
           "Bytes in requests to the remote, by verb and direction."),
)  # fmt: skip


# -- Prometheus: a collector for its client, and a file for node exporter


def _latest_counts() -> CacheStats | None:
    """Return the counts of the cache that was enabled last, even after it was disabled."""
    cache = current_cache()
    return None if cache is None else cache.stats()


class PrometheusCollector:
    """A collector that gives Prometheus the counts of a process at every scrape.

    By default they are those of the cache that was enabled last. Raises ConfigError if
    ``prometheus-client`` is not installed.
    """

    def __init__(self, source: Source | None = None) -> None:
        _library("prometheus_client", "prometheus-client")
        self._source = source or _latest_counts

    def describe(self) -> tuple[()]:
        """Return nothing, so that registering the collector does not read the counts."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield every metric; none if no cache was enabled yet."""
        from prometheus_client import core

        stats = self._source()
        for family, samples in () if stats is None else families(stats):
            kind = getattr(core, f"{family.kind.title()}MetricFamily")
            metric = kind(family.prometheus_name, family.text, labels=family.labels)
            for sample in samples:
                buckets = [("+Inf" if math.isinf(to) else repr(to), n) for to, n in sample.buckets]
                value = (buckets, sample.value) if buckets else (sample.value,)
                metric.add_metric([sample.labels[label] for label in family.labels], *value)
            yield metric


def write_textfile(path: str | os.PathLike[str], source: Source | None = None) -> None:
    """Write all metrics to ``path`` atomically, for node exporter's textfile collector.

    Every process of a machine needs its own file. Raises OSError if the file cannot be written, and
    ConfigError if ``prometheus-client`` is not installed, or if ``path`` is not a regular file: a
    device or a pipe would be replaced by one.
    """
    client = _library("prometheus_client", "prometheus-client")
    if os.path.exists(path) and not os.path.isfile(path):
        thing = f"metrics file {os.fspath(path)}"
        raise ConfigError(thing, "is not a regular file", "give another")
    registry = client.CollectorRegistry()
    registry.register(PrometheusCollector(source))
    client.write_to_textfile(os.fspath(path), registry)


def leave_textfile(path: str, source: Source) -> None:
    """Call :func:`write_textfile` at the end of a process, for the setting ``metrics_file``.

    ``{pid}`` in the path is replaced, and the word of a launcher in braces by the number of this
    process. An error is logged as one warning.
    """
    here = launch()
    words = {"pid": str(os.getpid()), here.word: here.number or "0"}
    file = re.sub(r"\{(\w+)\}", lambda found: words.get(found[1], found[0]), path)
    try:
        write_textfile(file, source)
    except Exception as exc:  # noqa: BLE001 - the program has ended, and well
        logger.warning("metrics could not be written to %s: %s", file, exc)


def _library(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        problem = f"the package {package} is not installed"
        raise ConfigError("metrics", problem, f"pip install {package}") from exc


# -- OpenTelemetry
#
# Its API has no observable histogram, so durations become a count and a sum.


def observe(
    cache: Cache | None = None, *, meter_provider: MeterProvider | None = None
) -> Observation:
    """Let OpenTelemetry read the counts of ``cache``, by default of the one enabled last.

    Raises ConfigError if ``opentelemetry-api`` is not installed.
    """
    metrics = _library("opentelemetry.metrics", "opentelemetry-api")
    observation = Observation(_latest_counts if cache is None else cache.stats)
    meter = metrics.get_meter("s3cache", __version__, meter_provider)

    def read(family: Family, value: Callable[[Sample], float], _: object) -> list[Any]:
        stats = observation.source()
        samples = [] if stats is None else family.read(stats)
        return [metrics.Observation(value(each), dict(each.labels)) for each in samples]

    for family in FAMILIES:
        is_gauge = family.kind == "gauge"
        create = meter.create_observable_gauge if is_gauge else meter.create_observable_counter
        create(family.name, [partial(read, family, attrgetter("value"))], family.unit, family.text)
        if family.kind == "histogram":
            counts = partial(read, family, lambda each: each.buckets[-1][1])
            create(f"{family.name}.count", [counts], "{call}", f"How many: {family.text}")
    return observation


@dataclass
class Observation:
    """The observation by :func:`observe`; :meth:`stop` ends it.

    OpenTelemetry never removes instruments: after the end they report nothing.
    """

    source: Source

    def stop(self) -> None:
        """Report no more counts."""
        self.source = lambda: None
