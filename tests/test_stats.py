"""What is counted, and that it adds up."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from s3cache.stats import CacheStats, Counters, Reason, TransferEvent
from s3cache.store import MemoryStore
from s3cache.testing import FaultyStore
from tests.support.caching import KEY, entry, open_cache


def snapshot(counters: Counters, **changes: Any) -> CacheStats:
    return counters.snapshot(
        **{"local": None, "pending": 0, "breaker": "none", "remote": {}, **changes}
    )


def test_a_new_cache_has_counted_nothing() -> None:
    stats = snapshot(Counters())
    assert (stats.lookups, stats.saved, stats.uploaded, stats.downloaded) == (0, 0, 0, 0)
    assert stats.hits == {"local": 0, "remote": 0}
    assert stats.misses == {} == stats.not_saved


def test_counts_in_words() -> None:
    counters = Counters()
    assert snapshot(counters).in_words() == "nothing was looked up in this process"
    counters.bypassed(["freezing", "input"])
    assert snapshot(counters).in_words().startswith("0 hit, 0 missed, 1 bypassed (1 freezing, 1 in")
    counters.hit("remote", 10, 0.1)
    counters.hit("local", 10, 0.1)
    counters.miss(Reason.ABSENT, 0.1)
    counters.saved(10, 0.1)
    counters.time_saved(2.25)
    assert snapshot(counters).in_words() == (
        "2 hit (1 local, 1 remote), 1 missed (1 absent), 1 bypassed (1 freezing, 1 input), "
        "1 saved, 0 uploaded; 2.2 s of compiling spared"
    )
    halves = Counters()
    halves.hit("local", 10, 0.1)
    assert "1 bypassed (1 freezing, 1 input), 1 hit at the second level (1 local), 1 saved" in (
        snapshot(counters, fx=halves.level()).in_words()
    )


def test_counts_in_numbers_are_json() -> None:
    counters, halves = Counters(), Counters()
    counters.bypassed(["freezing"])
    counters.hit("local", 10, 0.1)
    counters.miss(Reason.ABSENT, 0.1)
    halves.hit("remote", 10, 0.1)
    numbers = snapshot(counters, fx=halves.level()).in_numbers()
    assert json.loads(json.dumps(numbers)) == {
        "hits": {"local": 1, "remote": 0},
        "misses": {"absent": 1},
        "bypassed": 1,
        "bypass_reasons": {"freezing": 1},
        "saved": 0,
        "uploaded": 0,
        "pending": 0,
        "refused": {},
        "second_level": {"hits": {"local": 0, "remote": 1}, "saved": 0},
        "time_saved_s": 0.0,
    }


def test_saves_at_the_second_level_are_shown_unless_superseded() -> None:
    """As of a graph without a backward: its forward is shared by itself."""
    counters, halves = Counters(), Counters()
    counters.miss(Reason.ABSENT, 0.1)
    halves.saved(10, 0.1)
    counters.transferred(TransferEvent("upload", "done", "name", 10))
    said = snapshot(counters, fx=halves.level()).in_words()
    assert "0 saved, 1 saved at the second level, 1 uploaded" in said
    halves.superseded()
    said = snapshot(counters, fx=halves.level()).in_words()
    assert "0 saved, 1 uploaded" in said


def test_hits_and_misses_are_all_lookups() -> None:
    counters = Counters()
    before = snapshot(counters)
    counters.hit("local", 10, 0.1)
    counters.hit("remote", 20, 0.2)
    counters.hit("remote", 30, 0.4)
    counters.miss(Reason.ABSENT, 0.1)
    counters.miss(Reason.TIMEOUT, 3.0)
    counters.miss(Reason.TIMEOUT, 5.0)
    stats = snapshot(counters)
    assert (before.lookups, stats.lookups) == (0, 6)
    assert stats.hits == {"local": 1, "remote": 2}
    assert stats.hit_bytes == {"local": 10, "remote": 50}
    assert stats.misses == {Reason.ABSENT: 1, Reason.TIMEOUT: 2}
    assert stats.hit_latency["remote"].count == 2
    assert stats.miss_latency.max_s == 5.0


def test_saves_are_counted_with_their_reasons_bytes_and_times() -> None:
    counters = Counters()
    counters.saved(100, 0.1)
    counters.not_saved(Reason.FULL, 0.3)
    counters.transferred(TransferEvent("upload", "started", "name", 1))
    counters.transferred(TransferEvent("upload", "done", "name", 100))
    counters.upload_failed()
    counters.transferred(TransferEvent("download", "done", "name", 7))
    counters.set_aside("local")
    stats = snapshot(counters, pending=3, breaker="open")
    assert (stats.saved, stats.saved_bytes) == (1, 100)
    assert stats.not_saved == {Reason.FULL: 1}
    assert (stats.uploaded, stats.uploaded_bytes, stats.upload_failures) == (1, 100, 1)
    assert (stats.downloaded, stats.downloaded_bytes) == (1, 7)
    assert stats.set_aside == {"local": 1, "remote": 0}
    assert stats.save_latency.count == 2
    assert (stats.pending, stats.breaker) == (3, "open")


def test_no_count_is_lost_between_threads() -> None:
    counters = Counters()

    def work() -> None:
        for _ in range(500):
            counters.hit("local", 1, 0.0)
            counters.miss(Reason.GUARD, 0.0)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = snapshot(counters)
    assert (stats.lookups, stats.hit_bytes["local"]) == (4_000, 2_000)


def test_a_reason_equals_its_code() -> None:
    assert str(Reason.GUARD) == f"{Reason.GUARD}" == "guard"
    assert Reason("guard") is Reason.GUARD  # type: ignore[call-arg]  # made with a text as well


def test_a_closed_cache_keeps_its_requests_and_pending_uploads(tmp_path: Path) -> None:
    store = FaultyStore(MemoryStore())
    cache = open_cache(tmp_path, store)
    cache.save(KEY, entry())
    assert cache.flush(30).complete
    store.inject("put", "hang")
    cache.save(KEY, entry(variant="more"))
    assert cache.close(0).remaining == 1
    stats = cache.stats()
    assert (stats.remote["put"].bytes_out, stats.pending, stats.breaker) == (
        stats.uploaded_bytes,
        1,
        "closed",
    )
    assert stats.uploaded_bytes > 0
