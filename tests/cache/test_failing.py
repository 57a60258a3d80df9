"""If a store fails or an entry is damaged, lookups miss with a reason and one warning."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from s3cache import entries
from s3cache.cache import Cache, Hit, Miss, NotSaved, Saved
from s3cache.errors import (
    AccessDeniedError,
    ClosedError,
    ConfigError,
    CorruptError,
    DownloadTimeoutError,
    NoSpaceError,
    PermanentError,
    TransientError,
)
from s3cache.frame import Frame
from s3cache.stats import Reason
from s3cache.store import MemoryStore
from s3cache.tier import DiskTier
from tests.cache.answers import FIRST, Machines, hit, local_files, miss
from tests.support.caching import KEY, OTHER, broken, entry, settings
from tests.support.faulty import Fault, FaultyStore
from tests.support.stores import FailingStore, GatedStore, holds, names, put
from tests.support.waiting import LONG_S


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TransientError("reset"), Reason.UNAVAILABLE),
        (PermanentError("gone"), Reason.UNAVAILABLE),
        (AccessDeniedError("403"), Reason.DENIED),
        (NoSpaceError("quota"), Reason.FULL),
        (CorruptError("body", "digest"), Reason.CORRUPT),
        (ClosedError("closed"), Reason.UNAVAILABLE),
        (ConfigError("store", "bad", "fix it"), Reason.UNAVAILABLE),
        (RuntimeError("bug"), Reason.ERROR),
        (KeyError("bug"), Reason.ERROR),
        (OSError("raw"), Reason.ERROR),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, Exception) else str(each),
)
def test_an_error_of_the_store_is_a_miss_with_its_reason_and_one_warning(
    machine: Machines, caplog: pytest.LogCaptureFixture, error: Exception, reason: Reason
) -> None:
    cache = machine(store=FailingStore(error))
    for _ in range(3):
        found = cache.lookup(KEY)
        assert miss(found) == reason
        assert isinstance(found, Miss)
        assert found.error is error
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    # Only a mistake in s3cache is logged with its traceback.
    assert bool(record.exc_info) == (reason is Reason.ERROR)
    assert cache.prefetch([KEY]).wait(LONG_S).failed == 1
    assert isinstance(cache.save(KEY, entry()), Saved)
    given_up = reason is Reason.CORRUPT
    assert cache.flush(20 if given_up else 0.2).remaining == (0 if given_up else 1)
    assert isinstance(cache.lookup(KEY, lambda found: False), Miss)
    found = cache.lookup(OTHER, lambda found: False)
    assert miss(found) == reason
    assert cache.stats().misses == {reason: 5}


def test_a_guard_that_fails_is_a_miss(machine: Machines, caplog: pytest.LogCaptureFixture) -> None:
    cache = machine()
    cache.save(KEY, entry())
    assert miss(cache.lookup(KEY, lambda found: 1 / 0 > 1)) == Reason.ERROR
    assert caplog.records[0].exc_info


@pytest.mark.parametrize(
    "error", [ConfigError("store", "bad", "fix it"), AccessDeniedError("403"), RuntimeError("bug")]
)
def test_no_save_is_lost_if_the_remote_cannot_be_opened(
    tmp_path: Path, memory: MemoryStore, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    broken_still = [True]

    def open_remote() -> MemoryStore:
        if broken_still:
            raise error
        return memory

    with Cache(settings(tmp_path), open_remote=open_remote, identity="place") as cache:
        for _ in range(2):
            assert isinstance(cache.lookup(OTHER), Miss)
            assert isinstance(cache.save(KEY, entry()), Saved)
        assert cache.prefetch([OTHER]).wait(LONG_S).failed == 1
        report = cache.flush(20)
        assert (report.remaining, report.error) == (1, error)
        assert isinstance(cache.lookup(KEY), Hit)
        # lookup, save or flush, prefetch
        assert len(caplog.records) == 3
        broken_still.clear()
        assert cache.flush(20).complete
    assert holds(memory, FIRST)


# -- strict: failures raise, where they would otherwise cause a miss and a warning


def test_a_strict_lookup_raises_the_error_of_the_store_and_is_counted(
    machine: Machines, caplog: pytest.LogCaptureFixture
) -> None:
    for error in (TransientError("reset"), AccessDeniedError("no"), RuntimeError("bug")):
        cache = machine(store=FailingStore(error), strict=True)
        for _ in range(2):
            with pytest.raises(type(error)) as caught:
                cache.lookup(KEY)
            assert caught.value is error
        assert cache.stats().lookups == 2
    assert caplog.records == []


def test_timeouts_full_queues_and_failing_guards_raise(machine: Machines) -> None:
    gated = GatedStore(MemoryStore(), is_open=False)
    cache = machine(None, gated, strict=True, upload_queue_max_count=1, lookup_timeout_s=0.01)
    with pytest.raises(DownloadTimeoutError):
        cache.lookup(KEY)
    cache.save(KEY, entry())
    with pytest.raises(NoSpaceError):
        cache.save(OTHER, entry(OTHER))
    stats = cache.stats()
    assert (stats.misses, stats.not_saved) == ({Reason.TIMEOUT: 1}, {Reason.FULL: 1})
    gated.is_open = True
    cache = machine(strict=True)
    cache.save(KEY, entry())
    with pytest.raises(ZeroDivisionError):
        cache.lookup(KEY, lambda found: 1 / 0 > 1)


def test_a_lookup_raises_on_damage_in_either_tier(
    machine: Machines, memory: MemoryStore, tmp_path: Path
) -> None:
    cache = machine(strict=True)
    put(memory, entries.first_name(KEY), broken(entry()))
    with pytest.raises(CorruptError):
        cache.lookup(KEY)
    cache.save(OTHER, entry(OTHER))
    assert cache.flush(20).complete
    for file in local_files(tmp_path):
        file.write_bytes(b"no frame")
    with pytest.raises(CorruptError):
        cache.lookup(OTHER)


def test_absence_modes_and_guards_do_not_raise(machine: Machines) -> None:
    cache = machine(strict=True)
    assert isinstance(cache.lookup(KEY), Miss)
    assert isinstance(cache.save(KEY, entry()), Saved)
    assert isinstance(cache.lookup(KEY, lambda found: False), Miss)
    assert isinstance(cache.lookup(KEY), Hit)
    assert isinstance(machine(mode="read-only", strict=True).save(KEY, entry()), NotSaved)
    assert isinstance(machine(mode="off", strict=True).lookup(KEY), Miss)


def test_a_remote_that_cannot_be_opened_raises(tmp_path: Path) -> None:
    def open_remote() -> MemoryStore:
        raise AccessDeniedError("403")

    cache = Cache(settings(tmp_path, strict=True), open_remote=open_remote)
    lookup, save = lambda: cache.lookup(KEY), lambda: cache.save(KEY, entry())
    for call in (cache.start, lookup, save, lambda: cache.prefetch([KEY])):
        with pytest.raises(AccessDeniedError):
            call()
    cache.close()


def test_a_failed_upload_logs_a_warning_and_raises_nothing(
    machine: Machines, caplog: pytest.LogCaptureFixture
) -> None:
    """It fails later on another thread, where no caller could catch the error."""
    cache = machine(store=FailingStore(AccessDeniedError("403")), strict=True)
    assert isinstance(cache.save(KEY, entry()), Saved)
    report = cache.flush(20)
    assert isinstance(report.error, AccessDeniedError)
    assert "an upload failed" in caplog.text


# -- if the local tier fails, one warning is logged, and the remote stores and serves entries


@pytest.mark.parametrize("opens_later", [True, False])
def test_a_flush_is_not_complete_while_a_broken_disk_holds_uploads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opens_later: bool
) -> None:
    """The entries were saved while the remote was down, on a disk that then became unreadable."""
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
            for method in ("pending", "adopt", "objects", "pending_object"):
                broken.setattr(DiskTier, method, fail)
            report = cache.flush(0.5)  # waits as long for the disk, which may recover
            assert (report.remaining, report.in_memory) == (3, 0)
        is_refused = False
        assert cache.flush(20).complete


def test_a_local_directory_that_is_removed_is_created_again(
    machine: Machines, tmp_path: Path, caplog: pytest.LogCaptureFixture
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


FOREIGN = bytes(entry(OTHER).data)
GOOD = bytes(entry().data)
FORGERIES = {
    "a broken section": broken(entry()),
    "a broken header": GOOD[:50] + b"\xff" + GOOD[51:],
    "cut short": GOOD[:-1],
    "nothing": b"",
    "bytes after its end": GOOD + b"x",
    "no frame": b"<html>" * 100,
    "another key's entry": FOREIGN,
    "a broken entry of another variant": broken(entry(variant="b")),
    "an entry of an illegal variant": bytes(entry(KEY, "0").data),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_damaged_remote_entry_is_a_miss_and_the_next_save_replaces_it(
    machine: Machines,
    memory: MemoryStore,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    forgery: str,
) -> None:
    put(memory, FIRST, FORGERIES[forgery])
    a, b = machine("a"), machine("b")
    for _ in range(2):
        assert miss(a.lookup(KEY)) == Reason.CORRUPT
    assert len(caplog.records) == 1
    assert a.stats().set_aside["remote"] == 2
    assert b.prefetch([KEY]).wait(LONG_S).failed == 1
    assert local_files(tmp_path, "a") + local_files(tmp_path, "b") == []
    a.save(KEY, entry(payload=b"fresh"))
    assert a.flush(20).complete
    assert names(memory) == [FIRST]
    assert hit(b.lookup(KEY), "remote") == b"fresh"


@pytest.mark.parametrize("damage", [broken, lambda found: FOREIGN, lambda found: b""])
def test_a_damaged_local_file_is_set_aside_and_fetched_again(
    machine: Machines,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Frame], bytes],
) -> None:
    cache = machine()
    good = entry(payload=b"compiled" * 30)
    cache.save(KEY, good)
    assert cache.flush(20).complete
    (file,) = local_files(tmp_path)
    file.write_bytes(damage(good))
    assert hit(cache.lookup(KEY), "remote") == b"compiled" * 30
    assert hit(cache.lookup(KEY), "local") == b"compiled" * 30
    assert cache.stats().set_aside == {"local": 1, "remote": 0}
    assert len(caplog.records) == 1


def test_damage_in_transit_is_never_a_hit(machine: Machines, memory: MemoryStore) -> None:
    put(memory, FIRST, entry(payload=b"compiled" * 50).data)
    faulty = FaultyStore(memory, seed=7)
    faults: list[Fault] = ["truncate", "bit_flip"]
    for number in range(20):
        faulty.inject("get", faults[number % 2])
        assert miss(machine(f"m{number}", faulty).lookup(KEY)) == Reason.CORRUPT
    assert hit(machine("last", faulty).lookup(KEY), "remote") == b"compiled" * 50


# -- entries stored under a key other than their own


@pytest.mark.parametrize("name", [FIRST, entries.variant_name(KEY, "v")], ids=["first", "listed"])
def test_a_remote_entry_of_another_key_is_corrupt_and_is_not_kept_locally(
    machine: Machines, memory: MemoryStore, tmp_path: Path, name: str
) -> None:
    put(memory, FIRST, entry(variant="other").data)
    put(memory, name, FOREIGN)
    cache = machine()
    assert miss(cache.lookup(KEY, lambda found: found.header.key != KEY)) == Reason.CORRUPT
    assert FOREIGN not in [file.read_bytes() for file in local_files(tmp_path)]


def test_a_pending_entry_of_another_key_is_not_uploaded(
    machine: Machines, memory: MemoryStore, tmp_path: Path
) -> None:
    """A lookup does not return it either."""
    cache = machine("a")
    namespace = cache_namespace(tmp_path / "a", cache)
    cache.close()
    dead = DiskTier(tmp_path / "a", namespace=namespace, max_bytes=1 << 20, max_files=100)
    dead.put_pending(entries.variant_name(KEY, ""), FOREIGN)
    dead.close()
    adopter = machine("a")
    adopter.start()
    assert adopter.flush(20).remaining == 0
    assert names(memory) == [entries.first_name("named")]
    assert not isinstance(adopter.lookup(KEY), Hit)


def cache_namespace(root: Path, cache: Cache) -> str:
    """Return the name of the directory for the entries of a cache's remote."""
    cache.save("named", entry("named"))
    assert cache.flush(20).complete
    assert hit(cache.lookup("named"), "local")
    (namespace,) = [path.name.rstrip("+") for path in (root / "objects").iterdir()]
    return namespace


def test_a_cache_works_without_a_usable_local_directory(
    machine: Machines, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = machine("file/below")
    assert isinstance(cache.save(KEY, entry()), Saved)
    assert cache.flush(20).complete
    assert isinstance(cache.lookup(KEY), Hit)
    assert len(caplog.records) == 1


def test_other_variants_are_found_if_the_first_entry_is_damaged(
    machine: Machines, memory: MemoryStore
) -> None:
    put(memory, FIRST, broken(entry(variant="v1")))
    put(memory, entries.variant_name(KEY, "v2"), entry(variant="v2").data)
    cache = machine()
    assert isinstance(cache.lookup(KEY), Hit)
