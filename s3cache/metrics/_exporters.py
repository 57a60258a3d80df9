"""Export what is counted to Prometheus and OpenTelemetry."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from s3cache._logs import logger_of
from s3cache._version import __version__
from s3cache.cache import with_each
from s3cache.errors import ConfigError
from s3cache.metrics._families import FAMILIES, Family, Sample, Source, families, latest_counts

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider
    from prometheus_client.metrics_core import Metric

    from s3cache.cache import Cache
    from s3cache.stats import TransferEvent

__all__ = ["Observation", "PrometheusCollector", "leave_textfile", "observe", "write_textfile"]

# -- Prometheus: a collector for its client, and a file for node exporter


logger = logger_of("metrics")


class PrometheusCollector:
    """What a process's cache counts, whenever Prometheus asks.

    ::

        prometheus_client.REGISTRY.register(s3cache.metrics.PrometheusCollector())
        prometheus_client.start_http_server(9464)

    Args:
        source: gives the counts; left out, those of the cache that was enabled last.

    Raises:
        ConfigError: ``prometheus-client`` is not installed.
    """

    def __init__(self, source: Source | None = None) -> None:
        _client()
        self._source = source or latest_counts

    def describe(self) -> Iterator[Metric]:
        """Nothing: so that registering it does not ask for the counts."""
        yield from ()

    def collect(self) -> Iterator[Metric]:
        """Every metric there is, without samples where no cache was enabled yet."""
        stats = self._source()
        if stats is not None:
            for family, samples in families(stats):
                yield _metric(family, samples)


def write_textfile(path: str | os.PathLike[str], source: Source | None = None) -> None:
    """Write all metrics to ``path``, in one step, for node exporter's textfile collector.

    A process that ends before anybody asks it leaves its counts there. Of several on one machine
    each needs a file of its own.

    Raises:
        ConfigError: ``prometheus-client`` is not installed, or ``path`` is no regular file: a
            device or a pipe would be replaced by one.
        OSError: the file cannot be written.
    """
    client = _client()
    if os.path.exists(path) and not os.path.isfile(path):
        raise ConfigError(f"metrics file {os.fspath(path)}", "is no regular file", "name another")
    registry = client.CollectorRegistry()
    registry.register(PrometheusCollector(source))
    client.write_to_textfile(os.fspath(path), registry)


def leave_textfile(path: str, source: Source) -> None:
    """:func:`write_textfile` at the end of a process, as the setting ``metrics_file`` has it.

    ``{pid}`` and ``{rank}`` in the path become this process's. What fails is one warning.
    """
    rank = os.environ.get("RANK", "0")
    here = path.replace("{pid}", str(os.getpid())).replace("{rank}", rank)
    try:
        write_textfile(here, source)
    except Exception as exc:  # noqa: BLE001 - the program is over, and well
        logger.warning("no metrics are left in %s: %s", here, exc)


def _client() -> Any:
    try:
        import prometheus_client
    except ImportError as exc:
        raise ConfigError(
            "metrics for Prometheus",
            "the package prometheus-client is not installed",
            "pip install prometheus-client",
        ) from exc
    return prometheus_client


def _metric(family: Family, samples: list[Sample]) -> Metric:
    from prometheus_client import core

    metric: core.HistogramMetricFamily | core.CounterMetricFamily | core.GaugeMetricFamily
    arguments = (family.prometheus_name, family.text)
    if family.kind == "histogram":
        metric = core.HistogramMetricFamily(*arguments, labels=family.labels)
        for sample in samples:
            buckets = [(_bound(bound), count) for bound, count in sample.buckets]
            metric.add_metric(_values(family, sample), buckets, sample.value)
        return metric
    if family.kind == "counter":
        metric = core.CounterMetricFamily(*arguments, labels=family.labels)
    else:
        metric = core.GaugeMetricFamily(*arguments, labels=family.labels)
    for sample in samples:
        metric.add_metric(_values(family, sample), sample.value)
    return metric


def _values(family: Family, sample: Sample) -> list[str]:
    return [sample.labels[label] for label in family.labels]


def _bound(seconds: float) -> str:
    return "+Inf" if seconds == float("inf") else repr(seconds)


# -- OpenTelemetry: instruments that its SDK reads, and a span for each transfer
#
# Its API has no histogram that is read later, so of durations there are a count and a sum.


_NAME = "s3cache"
# Transfers whose end nobody has told of: no more are remembered.
_OPEN_AT_MOST = 10_000


def observe(
    cache: Cache | None = None,
    *,
    meter_provider: MeterProvider | None = None,
    tracer_provider: TracerProvider | None = None,
) -> Observation:
    """Have OpenTelemetry read what is counted, and see each upload and download as a span.

    Args:
        cache: whose counts and transfers; left out, those of whichever cache was enabled last, or
            will be.
        meter_provider: left out, the global one.
        tracer_provider: left out, the global one.

    Raises:
        ConfigError: ``opentelemetry-api`` is not installed.
    """
    try:
        from opentelemetry import metrics, trace
    except ImportError as exc:
        raise ConfigError(
            "metrics for OpenTelemetry",
            "the package opentelemetry-api is not installed",
            "pip install opentelemetry-api, and an SDK that exports",
        ) from exc
    meter = metrics.get_meter(_NAME, __version__, meter_provider)
    tracer = trace.get_tracer(_NAME, __version__, tracer_provider)
    observation = Observation(latest_counts if cache is None else cache.stats)
    for family in FAMILIES:
        observation.instrument(meter, metrics.Observation, family)
    spans = _Spans(tracer)

    def watch(cache: Cache) -> None:
        observation.end_with(cache.subscribe(spans.note))

    if cache is None:
        observation.end_with(with_each(watch))
    else:
        watch(cache)
    return observation


class Observation:
    """What :func:`observe` began; :meth:`stop` ends it.

    OpenTelemetry keeps its instruments for as long as it lives: after that they give nothing.
    """

    def __init__(self, source: Source) -> None:
        self._source: Source | None = source
        self._ends: list[Callable[[], None]] = []

    def stop(self) -> None:
        """Give no more counts and no more spans."""
        self._source = None
        while self._ends:
            self._ends.pop()()

    def end_with(self, end: Callable[[], None]) -> None:
        """Have :meth:`stop` call ``end``."""
        self._ends.append(end)

    def instrument(self, meter: Any, observation: Any, family: Family) -> None:
        """Make what reads ``family``."""

        def read(_: object) -> Iterable[Any]:
            return [observation(each.value, dict(each.labels)) for each in self._samples(family)]

        def count(_: object) -> Iterable[Any]:
            return [
                observation(each.buckets[-1][1], dict(each.labels))
                for each in self._samples(family)
            ]

        create = {
            "counter": meter.create_observable_counter,
            "gauge": meter.create_observable_gauge,
            "histogram": meter.create_observable_counter,
        }[family.kind]
        create(family.name, [read], family.unit, family.text)
        if family.kind == "histogram":
            create(f"{family.name}.count", [count], "{call}", f"How many: {family.text}")

    def _samples(self, family: Family) -> Iterable[Sample]:
        stats = None if self._source is None else self._source()
        return () if stats is None else family.read(stats)


class _Spans:
    """A span for each transfer, from its start to its end; a retried one has as many as tries."""

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer
        self._mutex = threading.Lock()
        self._began: dict[tuple[str, str], int] = {}

    def note(self, event: TransferEvent) -> None:
        """A listener for :meth:`s3cache.Cache.subscribe`."""
        at = (event.direction, event.name)
        now = time.time_ns()
        with self._mutex:
            if event.step == "started":
                if len(self._began) < _OPEN_AT_MOST:
                    self._began[at] = now
                return
            if event.step == "queued":
                return
            began = self._began.pop(at, now)
        span = self._tracer.start_span(
            f"{_NAME}.{event.direction}",
            attributes={
                "s3cache.object": event.name,
                "s3cache.size": event.size,
                "s3cache.outcome": event.step,
            },
            start_time=began,
        )
        if event.error is not None:
            from opentelemetry.trace import Status, StatusCode

            span.set_status(Status(StatusCode.ERROR, str(event.error)))
            span.set_attribute("error.type", type(event.error).__name__)
        span.end(now)
