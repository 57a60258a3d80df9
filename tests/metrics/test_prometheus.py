"""Prometheus' own client and parser read what is counted."""

from __future__ import annotations

import sys
from pathlib import Path

import prometheus_client
import pytest

from s3cache import Cache
from s3cache.errors import ConfigError
from s3cache.metrics import PrometheusCollector, families, write_textfile
from tests.metrics.counts import counted, read


@pytest.fixture
def registry() -> prometheus_client.CollectorRegistry:
    return prometheus_client.CollectorRegistry()


def test_each_sample_is_there_with_its_value(registry: prometheus_client.CollectorRegistry) -> None:
    registry.register(PrometheusCollector(counted))
    there = read(prometheus_client.generate_latest(registry).decode())
    for family, samples in families(counted()):
        for sample in samples:
            labels = tuple(sorted(sample.labels.items()))
            name = family.prometheus_name
            if family.kind == "histogram":
                assert there.pop((f"{name}_sum", labels)) == pytest.approx(sample.value)
                assert there.pop((f"{name}_count", labels)) == sample.buckets[-1][1]
                of_name = [key for key in there if key[0] == f"{name}_bucket"]
                of_sample = [key for key in of_name if {*labels} <= {*key[1]}]
                assert [there.pop(key) for key in of_sample] == [n for _, n in sample.buckets]
            else:
                total = "_total" if family.kind == "counter" else ""
                assert there.pop((f"{name}{total}", labels)) == sample.value
    assert not there


def test_without_a_cache_there_is_nothing(registry: prometheus_client.CollectorRegistry) -> None:
    registry.register(PrometheusCollector(lambda: None))
    assert not prometheus_client.generate_latest(registry)


def test_registering_asks_for_nothing(registry: prometheus_client.CollectorRegistry) -> None:
    def source() -> None:
        raise AssertionError("asked for the counts")

    registry.register(PrometheusCollector(source))


def test_two_caches_have_a_registry_each(tmp_path: Path) -> None:
    for number in range(2):
        registry = prometheus_client.CollectorRegistry()
        with Cache.open("memory://metrics", local=False) as cache:
            registry.register(PrometheusCollector(cache.stats))
            for key in range(number):
                cache.lookup(f"absent-{key}")
            there = read(prometheus_client.generate_latest(registry).decode())
            labels = (("level", "aot"), ("reason", "absent"))
            assert there.get(("s3cache_misses_total", labels), 0) == number


def test_the_file_is_replaced_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "job.prom"
    path.write_text("old\n")
    write_textfile(path, counted)
    assert read(path.read_text())[("s3cache_uploads_total", ())] == 17
    assert [each.name for each in tmp_path.iterdir()] == ["job.prom"]


@pytest.fixture
def without_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)


@pytest.mark.usefixtures("without_client")
def test_without_the_client_one_error_says_so() -> None:
    with pytest.raises(ConfigError, match=r"prometheus-client is not installed.*pip install"):
        PrometheusCollector(counted)
