"""A hanging disk, such as a frozen file system or a dead NFS, delays no caller for long."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from s3cache.cache import Cache, Hit, Miss, Saved
from s3cache.errors import ConfigError, S3CacheError
from s3cache.store import FileStore, MemoryStore, ObjectFiles
from s3cache.tier import DiskTier
from s3cache.util.threads import DeadlineExecutor
from tests.support.caching import KEY, OTHER, entry, open_cache
from tests.support.hanging import FreezableDisk, dead_mount
from tests.support.marks import cases
from tests.support.waiting import LONG_S, eventually


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FreezableDisk]:
    with FreezableDisk.mounted(tmp_path_factory.mktemp("freezable")) as disk:
        yield disk


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeadlineExecutor, "limit_s", 0.3)


# All operations of a tier, in an order in which each has something to do.
OPERATIONS: dict[str, Callable[[DiskTier], object]] = {
    "put": lambda tier: tier.put("new", b"x"),
    "put_pending": lambda tier: tier.put_pending("late", b"x"),
    "get": lambda tier: tier.get("old"),
    "peek": lambda tier: tier.peek("old"),
    "search": lambda tier: tier.search(["absent"], "old", lambda *_: None),
    "head": lambda tier: tier.head("old"),
    "objects": lambda tier: [*tier.objects()],
    "usage": lambda tier: tier.usage(),
    "within": lambda tier: tier.within("claims", lambda root: root.names()),
    "pending": lambda tier: tier.pending(),
    "recorded": lambda tier: tier.recorded(),
    "left_for_others": lambda tier: tier.left_for_others(),
    "adopt": lambda tier: tier.adopt(),
    "pending_object": lambda tier: tier.pending_object("old"),
    "give_back": lambda tier: tier.give_back("old"),
    "forget_uploaded": lambda tier: tier.forget_uploaded({"late": None}),
    "delete": lambda tier: tier.delete("late"),
    "close": lambda tier: tier.close(),
}
# On a frozen file system these wait; operations that only read continue.
CHANGES = ["put", "put_pending", "get", "forget_uploaded", "delete"]
# System calls that do not access a disk.
NO_DISK = {"fspath", "getcwd", "geteuid", "getpid", "urandom", "_path_normpath"}


def test_no_disk_call_is_made_on_the_callers_thread(tmp_path: Path) -> None:
    """If a call hangs, it hangs on another thread, and the caller waits for a limited time."""
    noted: dict[str, set[str]] = {}

    def calls_in(work: Callable[[], object]) -> set[str]:
        names: set[str] = set()

        def note(_: object, event: str, function: object) -> None:
            module = getattr(function, "__module__", None)
            if event == "c_call" and module in ("posix", "fcntl", "_io", "io"):
                names.add(getattr(function, "__name__", ""))

        gc.disable()  # a collection would close files of other tests on this thread
        sys.setprofile(note)
        try:
            work()
        finally:
            sys.setprofile(None)
            gc.enable()
        return names - NO_DISK

    public = {name for name, value in vars(DiskTier).items() if callable(value) and name[0] != "_"}
    assert OPERATIONS.keys() == public
    tiers: list[DiskTier] = []
    make = partial(DiskTier, tmp_path / "tier", max_bytes=1 << 20, max_files=100)
    noted["DiskTier()"] = calls_in(lambda: tiers.append(make()))
    (tier,) = tiers
    tier.put_pending("old", b"x")
    for name, operation in OPERATIONS.items():
        noted[name] = calls_in(lambda: operation(tier))  # noqa: B023
    assert {name: calls for name, calls in noted.items() if calls} == {}
    # A disk call on this thread is noted.
    files = ObjectFiles(tmp_path / "tier")
    assert {"open", "write", "replace"} <= calls_in(lambda: files.write("key", b"x"))


@pytest.mark.parametrize(
    "operation", cases(CHANGES, slow_ones=["get", "forget_uploaded", "delete"])
)
def test_no_operation_on_a_frozen_disk_takes_long(disk: FreezableDisk, operation: str) -> None:
    """One call waits, and the others fail at once; after the thaw the tier works again."""
    tier = DiskTier(disk.path / operation, max_bytes=1 << 20, max_files=100)
    for name in ("old", "late"):
        tier.put_pending(name, b"x")
    began = time.monotonic()
    with disk.frozen():
        tier.deadline.limit_s = 0.3
        with pytest.raises(S3CacheError, match="file system of"):
            OPERATIONS[operation](tier)
        for _ in range(100):
            with pytest.raises(S3CacheError, match="hangs"):
                tier.put("more", b"x")
            with pytest.raises(S3CacheError, match="hangs"):
                tier.get("old")
    assert time.monotonic() - began < LONG_S
    tier.deadline.limit_s = LONG_S  # a busy disk may take longer than the limit for a frozen one
    eventually(lambda: succeeds(partial(tier.put, "later", b"x")))
    assert tier.get("later") == b"x"
    assert tier.usage().files == len([*tier.objects()])
    tier.close()


def succeeds(call: Callable[[], object]) -> bool:
    with contextlib.suppress(S3CacheError):
        call()
        return True
    return False


@pytest.mark.usefixtures("impatient")
def test_a_cache_on_a_frozen_disk_works_without_the_disk(
    disk: FreezableDisk, caplog: pytest.LogCaptureFixture
) -> None:
    """Saves use memory and are not durable, lookups use the remote; one warning is logged."""
    remote = MemoryStore()
    cache = open_cache(disk.path / "cache", remote)
    cache.save(KEY, entry())
    assert cache.flush(LONG_S).complete
    began = time.monotonic()
    with disk.frozen():
        for number in range(20):
            saved = cache.save(f"key{number}", entry(f"key{number}"))
            assert isinstance(saved, Saved)
            assert not saved.durable
        for _ in range(20):
            assert isinstance(cache.lookup(KEY), Hit)
            assert isinstance(cache.lookup("absent"), Miss)
        assert cache.flush(LONG_S).complete
        assert cache.stats().uploaded == 21
        cache.close(LONG_S)
    assert time.monotonic() - began < LONG_S
    assert len(caplog.records) == 1
    assert "file system" in caplog.text


@pytest.mark.usefixtures("impatient")
def test_a_cache_works_without_a_directory_that_hangs_from_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A store, or a signing key, in such a directory is an error."""
    dead = tmp_path / "dead"
    dead.mkdir()
    with dead_mount(dead):
        cache = open_cache(dead / "cache", MemoryStore())
        saved = cache.save(OTHER, entry(OTHER))
        assert isinstance(saved, Saved)
        assert not saved.durable
        assert isinstance(cache.lookup(KEY), Miss)
        assert cache.flush(LONG_S).complete
        assert "there is no local tier" in caplog.text
        cache.close()
        with pytest.raises(S3CacheError, match="file system of"):
            FileStore(dead / "store")
        with pytest.raises(ConfigError, match="signing key"):
            Cache.open(local=False, signing_key=dead / "key")
