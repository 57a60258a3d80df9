"""Every count is in a metric with a conventional name, for Prometheus and OpenTelemetry."""

from __future__ import annotations

import dataclasses
import os
import re
import stat
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client.parser import text_string_to_metric_families

from s3cache import Cache
from s3cache.cache import Hit, set_current
from s3cache.errors import ConfigError
from s3cache.metrics import (
    FAMILIES,
    PrometheusCollector,
    families,
    leave_textfile,
    observe,
    write_textfile,
)
from s3cache.stats import CacheStats, HistogramSnapshot, LevelStats, Reason, Usage, VerbStats
from tests.support.caching import entry
from tests.support.sites import Site


def some(number: int) -> HistogramSnapshot:
    recorded = HistogramSnapshot()
    for power in range(number):
        recorded = recorded.plus(10.0 ** (power - 5))
    return recorded


def counted() -> CacheStats:
    """Return stats in which all counts are set and different."""
    return CacheStats(
        hits={"local": 11, "remote": 12},
        misses={Reason.ABSENT: 13, Reason.TIMEOUT: 14},
        saved=15,
        not_saved={Reason.FULL: 16},
        uploaded=17,
        upload_failures=18,
        downloaded=19,
        hit_bytes={"local": 20, "remote": 21},
        saved_bytes=22,
        uploaded_bytes=23,
        downloaded_bytes=24,
        hit_latency={"local": some(3), "remote": some(4)},
        miss_latency=some(5),
        save_latency=some(6),
        set_aside={"local": 25, "remote": 26},
        bypassed=27,
        bypass_reasons={"custom_op": 28},
        time_saved_s=29.5,
        refused={"unsigned": 30},
        local=Usage(31, 32),
        pending=33,
        breaker="open",
        remote={"get": VerbStats(3, {"TransientError": 34}, 35, 36, some(7))},
        fx=LevelStats({"local": 37}, {Reason.GUARD: 38}, 39, 41, {"foreign": 42}, {"key": 43}, 40),
        features={"recall": {"recalled": 44, "refused:object": 49}},
        kinds={"triton": LevelStats({"remote": 54}, {Reason.ABSENT: 55}, 56)},
    )


def read(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_names_follow_the_rules_of_both_ecosystems() -> None:
    """See https://opentelemetry.io/docs/specs/semconv/general/naming/ and Prometheus' own rules."""
    for family in FAMILIES:
        assert re.fullmatch(r"s3cache(\.[a-z]+(_[a-z]+)*)+", family.name), family
        assert family.unit in ("s", "By") or re.fullmatch(r"\{[a-z]+\}", family.unit), family
        assert family.text.endswith("."), family
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", family.prometheus_name.replace("s3", "s")), family
        assert not family.prometheus_name.endswith("_total"), "the client adds this suffix"
        if family.kind == "histogram":
            assert family.prometheus_name.endswith("_seconds")
    for names in ([f.name for f in FAMILIES], [f.prometheus_name for f in FAMILIES]):
        assert len({*names}) == len(names)


def test_every_count_changes_a_metric() -> None:
    """Each count is removed in turn, and this changes a metric."""
    stats, level = counted(), counted().fx
    less: dict[str, CacheStats] = {}
    for name in (field.name for field in dataclasses.fields(stats)):
        less[name] = replace(stats, **{name: getattr(CacheStats(), name)})
    for name in (field.name for field in dataclasses.fields(level)):
        fx = replace(level, **{name: getattr(LevelStats(), name)})
        less[f"fx.{name}"] = replace(stats, fx=fx)
    unseen = {name for name, each in less.items() if families(each) == families(stats)}
    # Saved bytes are counted at their upload. Superseded halves were never shared.
    assert unseen == {"saved_bytes", "fx.contained"}


def test_samples_have_the_labels_and_buckets_of_their_family() -> None:
    found = {family.name: samples for family, samples in families(counted())}
    for family in FAMILIES:
        samples = found[family.name]
        assert samples, family.name
        assert {tuple(sample.labels) for sample in samples} == {family.labels}, family.name
        assert len({tuple(sample.labels.values()) for sample in samples}) == len(samples)
        assert {bool(sample.buckets) for sample in samples} == {family.kind == "histogram"}
    [saves] = found["s3cache.save.duration"]
    assert saves.value == pytest.approx(1.11111)
    for bound, count in saves.buckets:
        if bound < 10:  # the bucket of each value is certain up to 10
            assert count == sum(10.0 ** (power - 5) < bound for power in range(6)), bound
    assert saves.buckets[-1] == (float("inf"), 6)


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


def open_cache(tmp_path: Path, machine: str) -> Cache:
    return Cache.open(f"file://{tmp_path / 'remote'}?create=1", local_dir=tmp_path / machine)


def save(cache: Cache, key: str) -> None:
    cache.save(key, entry(key))
    assert cache.flush(60).complete


def test_every_family_is_exported(tmp_path: Path) -> None:
    telemetry = Telemetry()
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


def test_a_cache_enabled_later_is_observed_too(tmp_path: Path) -> None:
    telemetry = Telemetry()
    observe(meter_provider=telemetry.provider)
    for number in range(2):
        with open_cache(tmp_path, str(number)) as cache:
            set_current(cache)
            save(cache, f"key-{number}")
            first, _ = telemetry.metrics()["s3cache.saved"].data.data_points
            assert (first.attributes, first.value) == ({"kind": "aot"}, 1)


def test_a_missing_library_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("opentelemetry.metrics", "prometheus_client"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r"opentelemetry-api is not installed.*pip install"):
        observe()
    with pytest.raises(ConfigError, match=r"prometheus-client is not installed.*pip install"):
        PrometheusCollector(counted)


def test_each_sample_has_its_value() -> None:
    registry = prometheus_client.CollectorRegistry()
    registry.register(PrometheusCollector(counted))
    samples_by_name = read(prometheus_client.generate_latest(registry).decode())
    for family, samples in families(counted()):
        for sample in samples:
            labels = tuple(sorted(sample.labels.items()))
            name = family.prometheus_name
            if family.kind == "histogram":
                assert samples_by_name.pop((f"{name}_sum", labels)) == pytest.approx(sample.value)
                assert samples_by_name.pop((f"{name}_count", labels)) == sample.buckets[-1][1]
                of_name = [key for key in samples_by_name if key[0] == f"{name}_bucket"]
                of_sample = [key for key in of_name if {*labels} <= {*key[1]}]
                assert [samples_by_name.pop(key) for key in of_sample] == [
                    n for _, n in sample.buckets
                ]
            else:
                total = "_total" if family.kind == "counter" else ""
                assert samples_by_name.pop((f"{name}{total}", labels)) == sample.value
    assert not samples_by_name


def test_registering_does_not_read_the_counts() -> None:
    registry = prometheus_client.CollectorRegistry()
    asked: list[bool] = []
    registry.register(PrometheusCollector(lambda: asked.append(True)))
    assert not asked
    assert not prometheus_client.generate_latest(registry)
    assert asked


def test_the_file_is_replaced_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "job.prom"
    path.write_text("old\n")
    write_textfile(path, counted)
    assert read(path.read_text())[("s3cache_uploads_total", ())] == 17
    assert [each.name for each in tmp_path.iterdir()] == ["job.prom"]
    os.mkfifo(tmp_path / "pipe")  # the same as /dev/null for a program of root
    with pytest.raises(ConfigError, match="is not a regular file"):
        write_textfile(tmp_path / "pipe")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


# -- a file that a process writes when it ends

# Enables the cache, and makes a lookup and a save without a compilation.
_PROGRAM = """
import s3cache
from tests.support.caching import entry

cache = s3cache.enable()
cache.lookup("key-1")
cache.save("key-1", entry("key-1"))
"""


@pytest.mark.needs("ranks")
@pytest.mark.timeout(900)
def test_a_process_writes_its_counts_when_it_ends(tmp_path: Path) -> None:
    """The counts include uploads at the exit."""
    site = Site(tmp_path)
    file = f"{tmp_path}/job-{{rank}}.prom"
    machine = site.machine("one", S3CACHE_URL=site.url, S3CACHE_METRICS_FILE=file, RANK="3")
    done = machine.start("-c", _PROGRAM)
    assert (done.returncode, done.stderr) == (0, "")
    samples_by_name = read((tmp_path / "job-3.prom").read_text())
    assert samples_by_name["s3cache_misses_total", (("kind", "aot"), ("reason", "absent"))] == 1
    assert samples_by_name["s3cache_saved_total", (("kind", "aot"),)] == 1
    assert samples_by_name["s3cache_uploads_total", ()] >= 1


def test_a_metrics_file_that_cannot_be_written_causes_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    leave_textfile("job-{pid}.prom", counted)
    (message,) = caplog.messages
    assert message.startswith(f"metrics could not be written to job-{os.getpid()}.prom: ")
    assert "pip install prometheus-client" in message
