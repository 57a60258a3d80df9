"""Example counts for metrics, and a parser of Prometheus' text format."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from s3cache.stats import CacheStats, HistogramSnapshot, LevelStats, Reason, Usage, VerbStats


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
