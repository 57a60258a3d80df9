"""Prometheus: a collector for its client, and a file that node exporter collects."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from s3cache._logs import logger_of
from s3cache.errors import ConfigError
from s3cache.metrics._families import Family, Sample, Source, families, latest_counts

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

__all__ = ["PrometheusCollector", "leave_textfile", "write_textfile"]

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
        ConfigError: ``prometheus-client`` is not installed.
        OSError: the file cannot be written.
    """
    client = _client()
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
