"""The end of a process, and forks: what was acknowledged is not lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from s3cache.cache import Hit
from s3cache.store import FileStore, MemoryStore
from tests.cache.answers import FIRST
from tests.support.caching import open_cache
from tests.support.scripts import run_script
from tests.support.stores import holds
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("leave", ["", "sys.exit(0)", "threading.Thread(target=sys.exit).start()"])
def test_a_remote_that_hangs_delays_the_exit_no_longer_than_it_may(
    tmp_path: Path, leave: str
) -> None:
    done = run_script(
        f"""
        import pathlib
        cache = open_cache(pathlib.Path(sys.argv[1]), Hanging(), exit_timeout_s=0.1,
                           lookup_timeout_s=0.05)
        cache.save(KEY, entry())
        cache.lookup(OTHER)
        cache.prefetch([f"key{{number}}" for number in range(50)])
        print(cache.stats().misses)
        {leave}
        """,
        tmp_path,
    )
    assert "TIMEOUT" in done.stdout
    warnings = done.stderr.splitlines()
    assert len(warnings) == 2, done.stderr
    assert "no answer within" in warnings[0]
    assert warnings[1].endswith("on record for the next process on this machine: 1; lost: 0")
    with open_cache(tmp_path, memory := MemoryStore()) as later:
        later.start()
        eventually(lambda: holds(memory, FIRST))


def test_what_only_memory_holds_is_reported_lost_at_exit() -> None:
    done = run_script(
        """
        from s3cache.errors import AccessDeniedError
        class Denied(MemoryStore):
            async def put(self, *args, **more): raise AccessDeniedError("403")
        parked = open_cache(None, Denied(), exit_timeout_s=0.1)
        parked.save(KEY, entry())
        hanging = open_cache(None, Hanging(), exit_timeout_s=0.1)
        hanging.save(KEY, entry())
        """
    )
    failed, *left = done.stderr.splitlines()
    assert "403" in failed
    assert len(left) == 2
    for line in left:
        assert "uploads to memory:// that are unfinished: 1; on record" in line
        assert line.endswith("this machine: 0; lost: 1")


FORK = """
import pathlib
from tests.support.locks import locks_of
remote = FileStore(sys.argv[2])
gate = GatedStore(remote, is_open=False)
cache = open_cache(pathlib.Path(sys.argv[1]), {store})
cache.save("before", entry("before"))
{before}
child = os.fork()
if child == 0:
    try:
        assert isinstance(cache.lookup("absent"), Miss)
        assert isinstance(cache.lookup("before"), Hit)
        assert isinstance(cache.save("child", entry("child")), Saved)
        assert cache.stats().lookups == 2, cache.stats()
        {child}
        cache.close()
        os._exit(0)
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(1)
assert join(child) == 0
{after}
assert isinstance(cache.lookup("before"), Hit)
assert isinstance(cache.save("parent", entry("parent")), Saved)
assert cache.flush(20).complete
"""


def test_a_forked_child_and_its_parent_both_go_on(tmp_path: Path) -> None:
    done = run_script(
        FORK.format(
            store="remote",
            before="cache.flush(20)",
            child="assert cache.flush(20).complete",
            after="",
        ),
        tmp_path / "tier",
        tmp_path / "remote",
    )
    assert done.stderr == ""
    with open_cache(None, FileStore(tmp_path / "remote")) as reader:
        for key in ("before", "child", "parent"):
            assert isinstance(reader.lookup(key), Hit)


def test_a_fork_amid_transfers_with_every_lock_held(tmp_path: Path) -> None:
    """The child inherits neither the parent's transfers nor locks that stay locked."""
    done = run_script(
        FORK.format(
            store="gate",
            before="""
cache.prefetch([f"key{number}" for number in range(40)])
eventually(lambda: gate.waiting == 2)
locks = locks_of(cache, background())
assert len(locks) > 10, locks
for lock in locks: assert lock.acquire(timeout=100)
gate.is_open = True  # for the child; the parent's transfers are in the middle
""",
            child="assert cache.flush(20).complete",
            after="for lock in locks: lock.release()",
        ),
        tmp_path / "tier",
        tmp_path / "remote",
    )
    assert done.stderr == ""
    with open_cache(None, FileStore(tmp_path / "remote")) as reader:
        for key in ("before", "child", "parent"):
            assert isinstance(reader.lookup(key), Hit)


def test_a_closed_cache_stays_closed_in_a_forked_child() -> None:
    """And nothing of the child, which would close it at exit, keeps it."""
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
