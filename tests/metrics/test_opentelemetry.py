"""OpenTelemetry's SDK reads the counts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from s3cache import Cache
from s3cache.cache import Hit, set_active
from s3cache.errors import ConfigError
from s3cache.metrics import FAMILIES, families, observe
from tests.support.caching import entry


class Telemetry:
    """An SDK that exports to memory."""

    def __init__(self) -> None:
        self._reader = InMemoryMetricReader()
        self.provider = MeterProvider([self._reader])

    def metrics(self) -> dict[str, Any]:
        data = self._reader.get_metrics_data()
        return {
            metric.name: metric
            for resource in (data.resource_metrics if data else [])
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }


@pytest.fixture
def telemetry() -> Telemetry:
    return Telemetry()


def open_cache(tmp_path: Path, machine: str) -> Cache:
    return Cache.open(f"file://{tmp_path / 'remote'}?create=1", local_dir=tmp_path / machine)


def save(cache: Cache, key: str) -> None:
    cache.save(key, entry(key))
    assert cache.flush(60).complete


def test_every_family_is_exported(tmp_path: Path, telemetry: Telemetry) -> None:
    with open_cache(tmp_path, "one") as cache:
        observation = observe(cache, meter_provider=telemetry.provider)
        cache.lookup("key-1")
        save(cache, "key-1")
        assert isinstance(cache.lookup("key-1"), Hit)
        metrics = telemetry.metrics()
        for family, samples in families(cache.stats()):
            if not samples:
                assert family.name not in metrics
                continue
            metric = metrics[family.name]
            assert (metric.unit, metric.description) == (family.unit, family.text)
            points = {tuple(sorted(p.attributes.items())): p for p in metric.data.data_points}
            for sample in samples:
                point = points.pop(tuple(sorted(sample.labels.items())))
                if family.name != "s3cache.request.duration":  # which may change between two reads
                    assert point.value == pytest.approx(sample.value), family.name
            assert not points
            if family.kind == "histogram":
                counts = [at.value for at in metrics[f"{family.name}.count"].data.data_points]
                assert counts == [sample.buckets[-1][1] for sample in samples]
        names = {family.name for family in FAMILIES}
        assert {*metrics} <= names | {f"{name}.count" for name in names}
        observation.stop()
        assert not telemetry.metrics()


def test_a_cache_enabled_later_is_observed_too(tmp_path: Path, telemetry: Telemetry) -> None:
    observe(meter_provider=telemetry.provider)
    for number in range(2):
        with open_cache(tmp_path, str(number)) as cache:
            set_active(cache)
            save(cache, f"key-{number}")
            first, _ = telemetry.metrics()["s3cache.saved"].data.data_points
            assert (first.attributes, first.value) == ({"kind": "aot"}, 1)


def test_a_missing_opentelemetry_api_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.metrics", None)
    with pytest.raises(ConfigError, match=r"opentelemetry-api is not installed.*pip install"):
        observe()
