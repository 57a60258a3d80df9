"""What is counted and reported of lookups, saves and transfers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from s3cache import entries
from s3cache.cache import Cache, Hit, Miss
from s3cache.stats import Reason
from s3cache.store import MemoryStore
from tests.cache.answers import miss
from tests.support.caching import KEY, OTHER, entry
from tests.support.stores import put

if TYPE_CHECKING:
    from collections.abc import Callable


def test_everything_is_counted(machine: Callable[..., Cache], memory: MemoryStore) -> None:
    one, two = entry(), entry(OTHER, payload=b"x" * 1000)
    a, b = machine("a"), machine("b")
    a.save(KEY, one)
    a.save(OTHER, two)
    a.flush(20)
    b.lookup(KEY)
    b.lookup(KEY)
    b.lookup(OTHER)
    b.lookup("absent")
    b.lookup(KEY, lambda found: False)
    put(memory, entries.first_name("bad"), b"no frame")
    b.lookup("bad")
    saved, looked = a.stats(), b.stats()
    assert (saved.saved, saved.saved_bytes) == (2, one.size + two.size)
    assert (saved.uploaded, saved.uploaded_bytes) == (2, one.size + two.size)
    assert saved.save_latency.count == 2
    assert looked.hits == {"local": 1, "remote": 2}
    assert looked.hit_bytes == {"local": one.size, "remote": one.size + two.size}
    assert looked.misses == {Reason.ABSENT: 1, Reason.GUARD: 1, Reason.CORRUPT: 1}
    assert looked.lookups == 6
    assert (looked.downloaded, looked.downloaded_bytes) == (2, one.size + two.size)
    assert looked.hit_latency["local"].count == 1
    assert looked.hit_latency["remote"].count == 2
    assert looked.miss_latency.count == 3
    assert looked.remote["get"].bytes_in == one.size + two.size + len(b"no frame")
    assert looked.local is not None
    assert looked.local.files == 2
    assert looked.set_aside == {"local": 0, "remote": 1}


def test_transfers_can_be_watched(machine: Callable[..., Cache]) -> None:
    a, b = machine("a"), machine("b")
    seen: list[tuple[str, str]] = []
    end = a.subscribe(lambda event: seen.append((event.direction, event.step)))
    a.save(KEY, entry())
    assert a.flush(20).complete
    assert seen == [("upload", "queued"), ("upload", "started"), ("upload", "done")]
    end()
    a.save(OTHER, entry(OTHER))
    assert a.flush(20).complete
    assert len(seen) == 3
    b.subscribe(lambda event: seen.append((event.direction, event.step)))
    b.lookup(KEY)
    assert seen[3:] == [("download", "started"), ("download", "done")]


def test_a_lookup_by_a_listener_is_a_miss_not_a_hang(machine: Callable[..., Cache]) -> None:
    cache = machine()
    found: list[Hit | Miss] = []
    cache.subscribe(lambda event: found.append(cache.lookup(OTHER)))
    cache.save(KEY, entry())
    assert cache.flush(20).complete
    assert {miss(each) for each in found} == {Reason.ERROR}
