"""The end of a cache: it flushes, is disabled and collected."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from typing import TYPE_CHECKING

import pytest

from s3cache.cache import Cache, Hit, NotSaved
from s3cache.stats import Reason
from s3cache.store import MemoryStore
from s3cache.testing import FaultRates, FaultyStore
from tests.cache.answers import FIRST, miss
from tests.support.caching import KEY, OTHER, entry, open_engine
from tests.support.stores import GatedStore, holds
from tests.support.waiting import LONG_S, eventually, in_thread

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_closing_flushes(machine: Callable[..., Cache], memory: MemoryStore) -> None:
    cache = machine()
    cache.save(KEY, entry())
    assert cache.close().complete
    assert holds(memory, FIRST)
    assert cache.close().complete


def test_a_closed_cache_is_disabled(machine: Callable[..., Cache]) -> None:
    cache = machine()
    cache.save(KEY, entry())
    cache.close()
    assert miss(cache.lookup(KEY)) == Reason.DISABLED
    saved = cache.save(KEY, entry())
    assert isinstance(saved, NotSaved)
    assert saved.reason == Reason.DISABLED
    assert cache.prefetch([KEY]).wait(LONG_S).complete
    assert cache.flush(20).complete
    cache.start()
    cache.stats()


def test_a_flush_after_the_end_says_what_the_end_left(
    machine: Callable[..., Cache], remote: GatedStore
) -> None:
    remote.is_open = False
    cache = machine()
    cache.save(KEY, entry())
    first = cache.close(0.01)
    assert first.remaining == 1
    assert cache.flush() == cache.close() == first
    assert not cache.flush().complete


def test_closing_while_threads_look_up_and_save_raises_nothing(
    machine: Callable[..., Cache], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(10):
        cache = machine(store=FaultyStore(MemoryStore(), FaultRates(slow=1.0), slow_s=0.001))
        begun = threading.Barrier(5)

        def work(cache: Cache = cache, begun: threading.Barrier = begun) -> None:
            begun.wait(LONG_S)
            for number in range(40):
                cache.lookup(f"absent{number}")
                cache.save(f"key{number}", entry(f"key{number}"))
                cache.prefetch([f"more{number}"])

        joins = [in_thread(work) for _ in range(4)]
        begun.wait(LONG_S)
        cache.close(0)
        for join in joins:
            join()
        stats = cache.stats()
        assert stats.lookups == 160
        assert set(stats.misses) <= {Reason.ABSENT, Reason.DISABLED, Reason.UNAVAILABLE}
        assert set(stats.not_saved) <= {Reason.DISABLED, Reason.UNAVAILABLE}


def test_a_lookup_that_waits_is_released_when_the_cache_closes(
    machine: Callable[..., Cache], remote: GatedStore
) -> None:
    remote.is_open = False
    cache = machine()
    join = in_thread(lambda: cache.lookup(KEY))
    eventually(lambda: remote.waiting)
    cache.close(0)
    assert miss(join()) == Reason.UNAVAILABLE


def test_a_closed_cache_is_collected(tmp_path: Path) -> None:
    cache = open_engine(tmp_path, MemoryStore())
    cache.start()
    cache.save(KEY, entry())
    cache.lookup(OTHER)
    cache.prefetch([OTHER]).wait(LONG_S)
    cache.close()
    gone = weakref.ref(cache)
    del cache

    def collected() -> bool:
        gc.collect()
        return gone() is None

    eventually(collected)


_FIRST_USE = """
import atexit, sys, threading

def use():
    from s3cache import Cache, frame
    with Cache.open(f"file://{sys.argv[1]}?create=1", local_dir=sys.argv[2]) as cache:
        print(type(cache.lookup("key")).__name__)
        saved = cache.save("key", frame.encode(kind="t", key="key", sections={"a": b"x"}))
        print(saved.durable, type(cache.lookup("key")).__name__)
        print(cache.prefetch(["other"]).wait(3).complete, cache.flush(3).complete)

def late():
    threading.main_thread().join()
    use()

"""


@pytest.mark.parametrize("when", ["atexit.register(use)", "threading.Thread(target=late).start()"])
def test_a_cache_that_is_first_used_while_the_interpreter_exits_misses(
    tmp_path: Path, when: str
) -> None:
    """There are no threads any more: nothing is raised, and a later process uploads the rest."""
    places = (str(tmp_path / "remote"), str(tmp_path / "local"))
    done = subprocess.run(
        [sys.executable, "-c", _FIRST_USE + when, *places],
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=True,
    )
    assert done.stdout.splitlines() == ["Miss", "True Hit", "True False"]
    assert "Traceback" not in done.stderr
    with Cache.open(f"file://{places[0]}?create=1", local_dir=places[1]) as cache:
        assert cache.flush(20).complete
    with Cache.open(f"file://{places[0]}", local_dir=str(tmp_path / "other")) as cache:
        assert isinstance(cache.lookup("key"), Hit)
