"""A local tier that fails costs one warning; entries go to and come from the remote."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from s3cache.cache import Cache, Hit, NotSaved, Saved
from s3cache.errors import ConfigError, NoSpaceError, ReadOnlyError, TransientError
from s3cache.stats import Reason
from s3cache.store import MemoryStore
from s3cache.tier import DiskTier
from tests.support.caching import KEY, OTHER, entry, settings
from tests.support.stores import GatedStore, names

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.mark.parametrize(
    ("error", "warning"),
    [
        (NoSpaceError("disk full"), "too small"),
        (ReadOnlyError("read-only file system"), "cannot be written"),
        (TransientError("I/O error"), "cannot be written"),
        (ConfigError("directory", "belongs to another", "give another"), "cannot be written"),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, Exception) else "",
)
def test_where_the_disk_cannot_be_written_saves_go_through_memory(
    machine: Callable[..., Cache],
    memory: MemoryStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    warning: str,
) -> None:
    cache = machine()
    cache.save(OTHER, entry(OTHER))
    assert cache.flush(20).complete

    def fail(*_: object) -> None:
        raise error

    for method in ("put", "put_pending"):
        monkeypatch.setattr(DiskTier, method, fail)
    for number in range(3):
        saved = cache.save(f"key{number}", entry(f"key{number}"))
        assert isinstance(saved, Saved)
        assert not saved.durable
    assert cache.flush(20).complete
    assert len(names(memory)) == 4
    for _ in range(2):
        assert isinstance(cache.lookup("key0"), Hit)
    assert cache.stats().hits == {"local": 0, "remote": 2}
    assert isinstance(cache.lookup(OTHER), Hit)  # what is there can be read
    assert len(caplog.records) == 1
    assert warning in caplog.text


def test_where_the_disk_cannot_be_read_lookups_go_to_the_remote(
    machine: Callable[..., Cache],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = machine()
    cache.save(KEY, entry())
    assert cache.flush(20).complete

    def fail(*_: object, **__: object) -> None:
        raise TransientError("I/O error")

    for method in ("search", "get", "holds", "objects", "usage"):
        monkeypatch.setattr(DiskTier, method, fail)
    for _ in range(3):
        assert isinstance(cache.lookup(KEY), Hit)
    assert cache.stats().hits == {"local": 0, "remote": 3}
    assert cache.stats().local is None
    assert len(caplog.records) == 1


@pytest.mark.parametrize("opens_later", [True, False])
def test_a_flush_does_not_call_complete_what_a_broken_disk_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opens_later: bool
) -> None:
    """Saved when there was no remote to be had, on a disk that cannot be read any more."""
    is_refused = True

    def open_remote() -> MemoryStore:
        if is_refused:
            raise TransientError("no network")
        return MemoryStore()

    with Cache(settings(tmp_path), open_remote=open_remote, identity="place") as cache:
        for number in range(3):
            saved = cache.save(f"key{number}", entry(f"key{number}"))
            assert isinstance(saved, Saved)
            assert saved.durable

        def fail(*_: object, **__: object) -> None:
            raise TransientError("I/O error")

        is_refused = not opens_later
        with monkeypatch.context() as broken:
            for method in ("pending", "adopt", "objects", "peek"):
                broken.setattr(DiskTier, method, fail)
            report = cache.flush(20)
            assert (report.remaining, report.in_memory) == (3, 0)
        is_refused = False
        assert cache.flush(20).complete


def test_a_local_directory_that_is_removed_is_made_again(
    machine: Callable[..., Cache], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = machine()
    cache.save(KEY, entry())
    assert cache.flush(20).complete
    shutil.rmtree(tmp_path / "a")
    assert isinstance(cache.lookup(KEY), Hit)
    saved = cache.save(OTHER, entry(OTHER))
    assert isinstance(saved, Saved)
    assert saved.durable
    assert cache.flush(20).complete
    assert caplog.records == []


def test_without_a_usable_local_directory_there_is_a_cache_all_the_same(
    machine: Callable[..., Cache], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = machine("file/below")
    assert isinstance(cache.save(KEY, entry()), Saved)
    assert cache.flush(20).complete
    assert isinstance(cache.lookup(KEY), Hit)
    assert len(caplog.records) == 1


def test_a_full_memory_queue_refuses(
    machine: Callable[..., Cache], remote: GatedStore, caplog: pytest.LogCaptureFixture
) -> None:
    remote.is_open = False
    cache = machine(None, upload_queue_max_count=2)
    results = [cache.save(f"key{number}", entry(f"key{number}")) for number in range(4)]
    assert [type(each) for each in results] == [Saved, Saved, NotSaved, NotSaved]
    assert cache.stats().not_saved == {Reason.FULL: 2}
    assert len(caplog.records) == 1
    remote.is_open = True
    assert cache.flush(20).complete
    assert isinstance(cache.save("key2", entry("key2")), Saved)
