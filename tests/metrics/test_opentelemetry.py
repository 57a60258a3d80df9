"""OpenTelemetry's own SDK reads the counts, and gets a span for each transfer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from s3cache import Cache, Hit
from s3cache.cache import set_current
from s3cache.errors import ConfigError
from s3cache.metrics import FAMILIES, Observation, families, observe
from tests.support.caching import entry


class Telemetry:
    """An SDK that exports into memory."""

    def __init__(self) -> None:
        self._reader = InMemoryMetricReader()
        self.meters = MeterProvider([self._reader])
        self._spans = InMemorySpanExporter()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self._spans))

    def metrics(self) -> dict[str, Any]:
        data = self._reader.get_metrics_data()
        return {
            metric.name: metric
            for resource in (data.resource_metrics if data else [])
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    def spans(self) -> tuple[Any, ...]:
        return self._spans.get_finished_spans()


@pytest.fixture
def telemetry() -> Telemetry:
    return Telemetry()


def open_cache(tmp_path: Path, machine: str) -> Cache:
    return Cache.open(f"file://{tmp_path / 'remote'}?create=1", local_dir=tmp_path / machine)


def observed(cache: Cache | None, telemetry: Telemetry) -> Observation:
    return observe(cache, meter_provider=telemetry.meters, tracer_provider=telemetry.tracers)


def save(cache: Cache, key: str) -> None:
    cache.save(key, entry(key))
    assert cache.flush(60).complete


def test_every_family_is_exported(tmp_path: Path, telemetry: Telemetry) -> None:
    with open_cache(tmp_path, "one") as cache:
        observed(cache, telemetry)
        cache.lookup("key-1")
        save(cache, "key-1")
        assert isinstance(cache.lookup("key-1"), Hit)
        there = telemetry.metrics()
        for family, samples in families(cache.stats()):
            if not samples:
                assert family.name not in there
                continue
            metric = there[family.name]
            assert (metric.unit, metric.description) == (family.unit, family.text)
            points = {tuple(sorted(p.attributes.items())): p for p in metric.data.data_points}
            for sample in samples:
                point = points.pop(tuple(sorted(sample.labels.items())))
                if family.name != "s3cache.request.duration":  # the reader's own look is one more
                    assert point.value == pytest.approx(sample.value), family.name
            assert not points
            if family.kind == "histogram":
                [*counts] = there[f"{family.name}.count"].data.data_points
                assert [point.value for point in counts] == [
                    sample.buckets[-1][1] for sample in samples
                ]
    assert there.keys() - {f"{family.name}.count" for family in FAMILIES} <= {
        family.name for family in FAMILIES
    }


def test_a_transfer_is_a_span(tmp_path: Path, telemetry: Telemetry) -> None:
    with open_cache(tmp_path, "one") as cache:
        observed(cache, telemetry)
        save(cache, "key-1")
    with open_cache(tmp_path, "two") as cache:
        observed(cache, telemetry)
        assert isinstance(cache.lookup("key-1"), Hit)
        cache.lookup("key-2")
    ended = [(span.name, span.attributes["s3cache.outcome"]) for span in telemetry.spans()]
    assert ended[0] == ("s3cache.upload", "done")
    assert ended[-2:] == [("s3cache.download", "done"), ("s3cache.download", "absent")]
    assert {name for name, _ in ended[:-2]} == {"s3cache.upload"}
    up, down = telemetry.spans()[0], telemetry.spans()[-2]
    assert up.attributes["s3cache.size"] == down.attributes["s3cache.size"] == entry("key-1").size
    assert all(span.start_time <= span.end_time for span in telemetry.spans())
    assert all(span.status.status_code is StatusCode.UNSET for span in telemetry.spans())


def test_a_transfer_that_fails_says_why(tmp_path: Path, telemetry: Telemetry) -> None:
    with open_cache(tmp_path, "one") as cache:
        save(cache, "key-1")
    for path in (tmp_path / "remote" / "objects").rglob("*"):
        if path.is_file():
            path.write_bytes(b"damaged")
    with open_cache(tmp_path, "two") as cache:
        observed(cache, telemetry)
        cache.lookup("key-1")
    first = telemetry.spans()[0]
    assert first.status.status_code is StatusCode.ERROR
    assert first.attributes["error.type"] == "CorruptError"


def test_stop_ends_counts_and_spans(tmp_path: Path, telemetry: Telemetry) -> None:
    with open_cache(tmp_path, "one") as cache:
        observation = observed(cache, telemetry)
        assert telemetry.metrics()
        observation.stop()
        save(cache, "key-1")
        assert not telemetry.metrics()
    assert not telemetry.spans()


def test_without_the_api_there_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.metrics", None)
    with pytest.raises(ConfigError, match=r"opentelemetry-api is not installed.*pip install"):
        observe()


def test_a_cache_enabled_later_is_observed_too(tmp_path: Path, telemetry: Telemetry) -> None:
    observation = observed(None, telemetry)
    for number in range(2):
        with open_cache(tmp_path, str(number)) as cache:
            set_current(cache)
            save(cache, f"key-{number}")
            first, _ = telemetry.metrics()["s3cache.saved"].data.data_points
            assert (first.attributes, first.value) == ({"level": "aot"}, 1)
    seen = telemetry.spans()
    assert len(seen) == 2
    observation.stop()
    with open_cache(tmp_path, "more") as cache:
        set_current(cache)
        save(cache, "more")
    assert telemetry.spans() == seen
