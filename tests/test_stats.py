"""Counters of a cache and their sums."""

from __future__ import annotations

import functools
import json
import threading
from pathlib import Path

import pytest

from s3cache.stats import CacheStats, Counters, HistogramSnapshot, LevelStats, Reason
from s3cache.store import MemoryStore
from tests.support.caching import KEY, entry, open_cache
from tests.support.faulty import FaultyStore


def test_counts_are_shown_in_words() -> None:
    counters = Counters()
    assert counters.read(CacheStats).in_words() == "nothing was looked up in this process"
    counters.add(bypassed=1)
    for reason in ("freezing", "input"):
        counters.add(reason, bypass_reasons=1)
    assert counters.read(CacheStats).in_words().startswith("0 hit, 0 missed, 1 bypassed (1 free")
    counters.add("remote", hits=1, hit_bytes=10, hit_latency=0.1)
    counters.add("local", hits=1, hit_bytes=10, hit_latency=0.1)
    counters.add(Reason.ABSENT, misses=1, miss_latency=0.1)
    counters.add(saved=1, saved_bytes=10, save_latency=0.1)
    counters.add(time_saved_s=2.25)
    assert counters.read(CacheStats).in_words() == (
        "2 hit (1 local, 1 remote), 1 missed (1 absent), 1 bypassed (1 freezing, 1 input), "
        "1 saved, 0 uploaded; 2.2 s of compiling spared; "
        "`s3cache explain` says why graphs missed where others hit"
    )
    assert json.loads(json.dumps(counters.read(CacheStats).in_numbers()))["misses"] == {"absent": 1}
    second = Counters()
    second.add("local", hits=1, hit_bytes=10, hit_latency=0.1)
    assert "1 bypassed (1 freezing, 1 input), 1 hit at the second level (1 local), 1 saved" in (
        counters.read(CacheStats, fx=second.read(LevelStats)).in_words()
    )


def test_saves_at_the_second_level_are_shown_unless_a_whole_graph_contains_them() -> None:
    """For example, a graph without a backward shares its forward alone."""
    counters, second = Counters(), Counters()
    counters.add(Reason.ABSENT, misses=1, uploaded=1)
    second.add(saved=1)
    words = counters.read(CacheStats, fx=second.read(LevelStats)).in_words()
    assert "0 saved, 1 saved at the second level, 1 uploaded" in words
    second.add(contained=1)
    words = counters.read(CacheStats, fx=second.read(LevelStats)).in_words()
    assert "0 saved, 1 uploaded" in words


def test_no_count_is_lost_between_threads() -> None:
    counters = Counters()

    def work() -> None:
        for _ in range(500):
            counters.add("local", hits=1, hit_bytes=1, hit_latency=0.5)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        stats = counters.read(CacheStats)
        latency = stats.hit_latency["local"]
        assert stats.lookups == latency.count == sum(latency.buckets) == latency.total_s * 2
    for thread in threads:
        thread.join()
    stats = counters.read(CacheStats)
    assert (stats.lookups, stats.hit_bytes["local"]) == (2_000, 2_000)


def test_a_closed_cache_keeps_its_requests_and_pending_uploads(tmp_path: Path) -> None:
    store = FaultyStore(MemoryStore())
    cache = open_cache(tmp_path, store)
    cache.save(KEY, entry())
    assert cache.flush(30).complete
    store.inject("put", "hang")
    cache.save(KEY, entry(variant="more"))
    assert cache.close(0).remaining == 1
    stats = cache.stats()
    assert (stats.pending, stats.breaker) == (1, "closed")
    assert stats.remote["put"].bytes_out == stats.uploaded_bytes > 0


# -- durations


def recorded(*seconds: float) -> HistogramSnapshot:
    return functools.reduce(HistogramSnapshot.plus, seconds, HistogramSnapshot())


@pytest.mark.parametrize(
    ("seconds", "bucket"),
    [(-5.0, 0), (0.0, 0), (1e-12, 0), (1e-6, 1), (1.9e-6, 1), (2e-6, 2), (3.0, 22), (1e300, 39)],
)
def test_any_duration_has_a_bucket_and_sums_are_exact(seconds: float, bucket: int) -> None:
    assert recorded() == HistogramSnapshot()
    snapshot = recorded(0.25, 0.5, 1.25)
    assert (snapshot.count, snapshot.total_s, snapshot.max_s) == (3, 2.0, 1.25)
    assert [index for index, count in enumerate(recorded(seconds).buckets) if count] == [bucket]
