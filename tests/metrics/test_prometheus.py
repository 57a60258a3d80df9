"""Prometheus' client and parser read the counts, also from a file of an ended process."""

from __future__ import annotations

import os
import stat
import sys
import textwrap
from pathlib import Path

import prometheus_client
import pytest

from s3cache.errors import ConfigError
from s3cache.metrics import PrometheusCollector, families, write_textfile
from tests.metrics.counts import counted, read
from tests.support.sites import Site


@pytest.fixture
def registry() -> prometheus_client.CollectorRegistry:
    return prometheus_client.CollectorRegistry()


def test_each_sample_has_its_value(registry: prometheus_client.CollectorRegistry) -> None:
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


def test_registering_does_not_read_the_counts(
    registry: prometheus_client.CollectorRegistry,
) -> None:
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


def test_a_missing_prometheus_client_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"prometheus-client is not installed.*pip install"):
        PrometheusCollector(counted)


# -- a file that a process writes when it ends

# Enables the cache, and makes a lookup and a save without a compilation.
_PROGRAM = textwrap.dedent(
    """
    import s3cache
    from tests.support.caching import entry

    cache = s3cache.enable()
    cache.lookup("key-1")
    cache.save("key-1", entry("key-1"))
    """
)


def run_with_metrics_file(tmp_path: Path, *, code: str = _PROGRAM) -> tuple[str, Path]:
    """Run a process with a metrics file; return its standard error and the path of that file."""
    site = Site(tmp_path)
    place = tmp_path / "collected"
    place.mkdir()
    file = f"{place}/job-{{rank}}.prom"
    machine = site.machine("one", S3CACHE_URL=site.url, S3CACHE_METRICS_FILE=file, RANK="3")
    done = machine.start("-c", code)
    assert done.returncode == 0, done.stderr
    return done.stderr, place / "job-3.prom"


@pytest.mark.timeout(900)
def test_a_process_writes_its_counts_when_it_ends(tmp_path: Path) -> None:
    """The counts include uploads at the exit."""
    stderr, file = run_with_metrics_file(tmp_path)
    samples_by_name = read(file.read_text())
    assert samples_by_name["s3cache_misses_total", (("kind", "aot"), ("reason", "absent"))] == 1
    assert samples_by_name["s3cache_saved_total", (("kind", "aot"),)] == 1
    assert samples_by_name["s3cache_uploads_total", ()] >= 1
    assert not stderr


@pytest.mark.timeout(900)
def test_a_metrics_file_that_cannot_be_written_causes_one_warning(tmp_path: Path) -> None:
    stderr, _ = run_with_metrics_file(
        tmp_path, code=f'import sys; sys.modules["prometheus_client"] = None{_PROGRAM}'
    )
    assert stderr.count("metrics could not be written to") == len(stderr.splitlines()) == 1
    assert "pip install prometheus-client" in stderr
