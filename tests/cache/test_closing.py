"""Closing a cache: it is flushed, disabled and garbage-collected."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path

import pytest

from s3cache.cache import Cache, Hit, NotSaved
from s3cache.stats import Reason
from s3cache.store import FileStore, MemoryStore
from tests.cache.answers import Machines, miss
from tests.support.caching import KEY, OTHER, entry, open_cache, open_engine
from tests.support.faulty import FaultyStore
from tests.support.scripts import python, run_script
from tests.support.stores import GatedStore
from tests.support.waiting import LONG_S, eventually, in_thread


def test_a_closed_cache_is_disabled(machine: Machines) -> None:
    cache = machine()
    cache.save(KEY, entry())
    cache.close()
    assert miss(cache.lookup(KEY)) == Reason.DISABLED
    assert isinstance(saved := cache.save(KEY, entry()), NotSaved)
    assert saved.reason == Reason.DISABLED
    assert cache.prefetch([KEY]).wait(LONG_S).complete
    assert cache.flush(20).complete
    cache.start()
    cache.stats()


def test_a_flush_after_closing_repeats_the_report_of_the_close(
    machine: Machines, remote: GatedStore
) -> None:
    remote.is_open = False
    cache = machine()
    cache.save(KEY, entry())
    first = cache.close(0.01)
    assert first.remaining == 1
    assert cache.flush() == cache.close() == first
    assert not cache.flush().complete


def test_closing_while_threads_look_up_and_save_raises_nothing(
    machine: Machines, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        cache = machine(store=FaultyStore(MemoryStore(), {"slow": 1.0}, slow_s=0.001))
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
    machine: Machines, remote: GatedStore
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
    """No thread can start then: nothing is raised, and a later process uploads the entry."""
    places = (str(tmp_path / "remote"), str(tmp_path / "local"))
    done = python("-c", _FIRST_USE + when, *places)
    assert done.stdout.splitlines() == ["Miss", "True Hit", "True False"]
    assert "Traceback" not in done.stderr
    with Cache.open(f"file://{places[0]}?create=1", local_dir=places[1]) as cache:
        assert cache.flush(20).complete
    with Cache.open(f"file://{places[0]}", local_dir=str(tmp_path / "other")) as cache:
        assert isinstance(cache.lookup("key"), Hit)


# -- exit and fork of a process: no acknowledged save is lost


def test_uploads_held_only_in_memory_are_reported_lost_at_exit() -> None:
    done = run_script(
        """
        denying = DenyingStore(MemoryStore(), lambda verb, _: verb == "put")
        parked = open_cache(None, denying, exit_timeout_s=0.1)
        parked.save(KEY, entry())
        hanging = open_cache(None, Hanging(), exit_timeout_s=0.1)
        hanging.save(KEY, entry())
        """
    )
    failed, *left = done.stderr.splitlines()
    assert "not allowed" in failed
    assert len(left) == 2
    for line in left:
        assert "unfinished uploads to memory://: 1; recorded" in line
        assert line.endswith("this machine: 0; lost: 1")


def test_a_fork_is_safe_during_transfers_with_every_lock_held(tmp_path: Path) -> None:
    """The child inherits neither the parent's transfers nor locks that stay locked."""
    done = run_script(
        """
        import pathlib, traceback
        from tests.support.locks import locks_of
        remote = FileStore(sys.argv[2])
        gate = GatedStore(remote, is_open=False)
        cache = open_cache(pathlib.Path(sys.argv[1]), gate)
        cache.save("before", entry("before"))
        cache.prefetch([f"key{number}" for number in range(40)])
        eventually(lambda: gate.waiting == 9)  # by default, 8 downloads and the upload
        locks = locks_of(cache, background())
        assert len(locks) > 10, locks
        for lock in locks: assert lock.acquire(timeout=100)
        gate.is_open = True  # for the child; the parent's transfers have begun
        child = os.fork()
        if child == 0:
            try:
                assert isinstance(cache.lookup("absent"), Miss)
                assert isinstance(cache.lookup("before"), Hit)
                assert isinstance(cache.save("child", entry("child")), Saved)
                assert cache.stats().lookups == 2, cache.stats()
                assert cache.flush(20).complete
                cache.close()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        assert join(child) == 0
        for lock in locks: lock.release()
        assert isinstance(cache.lookup("before"), Hit)
        assert isinstance(cache.save("parent", entry("parent")), Saved)
        assert cache.flush(20).complete
        """,
        tmp_path / "tier",
        tmp_path / "remote",
    )
    assert done.stderr == ""
    with open_cache(None, FileStore(tmp_path / "remote")) as reader:
        for key in ("before", "child", "parent"):
            assert isinstance(reader.lookup(key), Hit)


def test_a_closed_cache_stays_closed_in_a_forked_child() -> None:
    """The child keeps no reference to it, for closing at exit or otherwise."""
    done = run_script(
        """
        import gc, weakref
        cache = open_engine(None, MemoryStore())
        cache.close()
        child = os.fork()
        if child == 0:
            hits = isinstance(cache.lookup(KEY), Hit)
            gone = weakref.ref(cache)
            del cache
            gc.collect()
            os._exit(hits + 2 * (gone() is not None))
        assert join(child) == 0
        """
    )
    assert done.stderr == ""
