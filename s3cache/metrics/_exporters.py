"""Export the counts to Prometheus and OpenTelemetry."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from s3cache.cache import with_each
from s3cache.errors import ConfigError
from s3cache.metrics._families import FAMILIES, Family, Sample, Source, families, latest_counts
from s3cache.util import __version__
from s3cache.util.logs import logger_of

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider
    from prometheus_client.metrics_core import Metric

    from s3cache.cache import Cache
    from s3cache.stats import TransferEvent

# -- Prometheus: a collector for its client, and a file for node exporter


logger = logger_of("metrics")


class PrometheusCollector:
    """Give Prometheus a process's counts whenever it asks.

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
        """Yield nothing, so that registering the collector does not ask for the counts."""
        yield from ()

    def collect(self) -> Iterator[Metric]:
        """Yield every metric; none where no cache was enabled yet."""
        stats = self._source()
        if stats is not None:
            for family, samples in families(stats):
                yield _metric(family, samples)


def write_textfile(path: str | os.PathLike[str], source: Source | None = None) -> None:
    """Write all metrics to ``path``, in one step, for node exporter's textfile collector.

    A process that ends before it is scraped leaves its counts there. Each process of a machine
    needs a file of its own.

    Raises:
        ConfigError: ``prometheus-client`` is not installed, or ``path`` is not a regular file: a
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
    """Call :func:`write_textfile` at the end of a process, for the setting ``metrics_file``.

    ``{pid}`` and ``{rank}`` in the path become this process's. An error is logged as one warning.
    """
    rank = os.environ.get("RANK", "0")
    here = path.replace("{pid}", str(os.getpid())).replace("{rank}", rank)
    try:
        write_textfile(here, source)
    except Exception as exc:  # noqa: BLE001 - the program has ended, and well
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

    kinds: dict[str, Any] = {
        "counter": core.CounterMetricFamily,
        "gauge": core.GaugeMetricFamily,
        "histogram": core.HistogramMetricFamily,
    }
    metric: Any = kinds[family.kind](family.prometheus_name, family.text, labels=family.labels)
    for sample in samples:
        labels = [sample.labels[label] for label in family.labels]
        if family.kind == "histogram":
            bounds = [("+Inf" if s == float("inf") else repr(s), n) for s, n in sample.buckets]
            metric.add_metric(labels, bounds, sample.value)
        else:
            metric.add_metric(labels, sample.value)
    return metric  # type: ignore[no-any-return]


# -- OpenTelemetry: instruments that its SDK reads, and a span for each transfer
#
# Its API has no histogram that is read later, so durations become a count and a sum.


_NAME = "s3cache"
# Transfers under way that are remembered at most: an end may never be reported.
_OPEN_AT_MOST = 10_000


def observe(
    cache: Cache | None = None,
    *,
    meter_provider: MeterProvider | None = None,
    tracer_provider: TracerProvider | None = None,
) -> Observation:
    """Have OpenTelemetry read the counts, and see each upload and download as a span.

    Args:
        cache: the cache to observe; left out, the one that was enabled last and all later ones.
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
        observation._instrument(meter, metrics.Observation, family)
    spans = _Spans(tracer)

    def watch(cache: Cache) -> None:
        observation._ends.append(cache.subscribe(spans.note))

    if cache is None:
        observation._ends.append(with_each(watch))
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

    def _instrument(self, meter: Any, observation: Any, family: Family) -> None:
        """Create the instruments that read ``family``."""

        def reader(value: Callable[[Sample], float]) -> Callable[[object], Iterable[Any]]:
            def read(_: object) -> Iterable[Any]:
                stats = None if self._source is None else self._source()
                samples = () if stats is None else family.read(stats)
                return [observation(value(each), dict(each.labels)) for each in samples]

            return read

        is_gauge = family.kind == "gauge"
        create = meter.create_observable_gauge if is_gauge else meter.create_observable_counter
        create(family.name, [reader(lambda each: each.value)], family.unit, family.text)
        if family.kind == "histogram":
            count = reader(lambda each: each.buckets[-1][1])
            create(f"{family.name}.count", [count], "{call}", f"How many: {family.text}")


class _Spans:
    """A span for each transfer, from its start to its end; a retried one has as many as tries."""

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer
        self._mutex = threading.Lock()
        self._began: dict[tuple[str, str], int] = {}

    def note(self, event: TransferEvent) -> None:
        """Take a step of a transfer; a listener for :meth:`s3cache.Cache.subscribe`."""
        at = (event.direction, event.name)
        now = time.time_ns()
        with self._mutex:
            if event.step == "started" and len(self._began) < _OPEN_AT_MOST:
                self._began[at] = now
            if event.step in ("queued", "started"):
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
