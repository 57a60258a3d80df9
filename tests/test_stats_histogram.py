"""The histogram: exact sums, percentiles within a factor of two, fixed memory."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from s3cache.stats import Histogram, HistogramSnapshot

durations = st.floats(0.0, 1e5)


def recorded(*seconds: float) -> HistogramSnapshot:
    histogram = Histogram()
    for s in seconds:
        histogram.record(s)
    return histogram.snapshot()


def test_an_empty_histogram_is_all_zero() -> None:
    snapshot = Histogram().snapshot()
    assert snapshot == HistogramSnapshot()
    assert snapshot.count == snapshot.mean_s == snapshot.max_s == snapshot.percentile(99) == 0


def test_count_sum_mean_and_maximum_are_exact() -> None:
    snapshot = recorded(0.25, 0.5, 1.25)
    assert snapshot.count == 3
    assert snapshot.total_s == 2.0
    assert snapshot.mean_s == pytest.approx(2 / 3)
    assert snapshot.max_s == 1.25


@given(st.lists(durations, min_size=1, max_size=50), st.sampled_from([1, 25, 50, 90, 99, 100]))
def test_percentiles_are_within_a_factor_of_two(seconds: list[float], q: int) -> None:
    exact = sorted(seconds)[max(-(-q * len(seconds) // 100), 1) - 1]
    got = recorded(*seconds).percentile(q)
    assert exact / 2 - 1e-6 <= got <= max(seconds)
    assert got <= max(exact * 2, 1e-6)


@given(st.lists(durations, min_size=1, max_size=50))
def test_percentiles_rise_to_the_maximum(seconds: list[float]) -> None:
    snapshot = recorded(*seconds)
    values = [snapshot.percentile(q) for q in range(0, 101, 5)]
    assert values == sorted(values)
    assert values[-1] == pytest.approx(max(seconds))


@pytest.mark.parametrize("q", [-1, 100.1, float("nan")])
def test_a_percentile_outside_0_to_100_is_refused(q: float) -> None:
    with pytest.raises(ValueError, match="outside"):
        recorded(1.0).percentile(q)


@pytest.mark.parametrize("seconds", [-5.0, 0.0, 1e-12, 1e-6, 3.0, 1e9, 1e300])
def test_any_duration_has_a_bucket(seconds: float) -> None:
    snapshot = recorded(seconds)
    assert sum(snapshot.buckets) == 1
    assert snapshot.percentile(100) == pytest.approx(max(seconds, 0.0))


def test_threads_lose_nothing_and_snapshots_are_consistent() -> None:
    histogram = Histogram()

    def work() -> None:
        for _ in range(2_000):
            histogram.record(0.5)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        snapshot = histogram.snapshot()
        assert snapshot.count == sum(snapshot.buckets) == snapshot.total_s * 2
    for thread in threads:
        thread.join()
    assert histogram.snapshot().count == 8_000
