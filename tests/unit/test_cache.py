"""The cache: what a lookup finds and a save keeps, whatever happens to disk, network or process."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest

from s3cache import entries, frame
from s3cache.cache import Cache, Hit, Miss, NotSaved, Saved
from s3cache.errors import (
    AccessDeniedError,
    ClosedError,
    ConfigError,
    CorruptError,
    NoSpaceError,
    PermanentError,
    ReadOnlyError,
    TransientError,
)
from s3cache.stats import Reason
from s3cache.store import FaultyStore, FileStore, LatencyStore, MemoryStore
from s3cache.tier import RemoteTier
from tests.support.caching import KEY, OTHER, GatedStore, broken, entry, open_cache, payload
from tests.support.scripts import run_script
from tests.support.waiting import eventually, in_thread
from tests.unit.test_entries import RacyStore, variants

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from s3cache.frame import Frame

FIRST = entries.first_name(KEY)


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def remote(memory: MemoryStore) -> GatedStore:
    return GatedStore(memory)


@pytest.fixture
def machine(tmp_path: Path, remote: GatedStore) -> Iterator[Callable[..., Cache]]:
    """Opens the cache of a machine, named by its local directory; all share one remote."""
    caches: list[Cache] = []

    def open_machine(name: str | None = "a", store: Any = remote, **changes: Any) -> Cache:
        caches.append(open_cache(tmp_path / name if name else None, store, **changes))
        return caches[-1]

    yield open_machine
    remote.is_open = True
    for cache in caches:
        cache.close(0)


def variant_is(*wanted: str) -> Callable[[Frame], bool]:
    return lambda found: found.header.variant in wanted


def miss(result: object) -> Reason:
    assert isinstance(result, Miss), result
    return result.reason


def hit(result: object, tier: str) -> bytes:
    assert isinstance(result, Hit), result
    assert result.tier == tier
    return payload(result.entry)


def calls(cache: Cache) -> dict[str, int]:
    return {verb: stats.calls for verb, stats in cache.stats().remote.items() if stats.calls}


def put(store: MemoryStore, name: str, data: bytes) -> None:
    store._objects[name] = (data, 0.0)


def local_files(tmp_path: Path, machine: str = "a") -> list[Path]:
    return [path for path in (tmp_path / machine / "objects").rglob("*") if path.is_file()]


# -- there and back


def test_what_one_machine_saves_another_finds(machine: Callable[..., Cache]) -> None:
    a, b = machine("a"), machine("b")
    saved = a.save(KEY, entry(payload=b"compiled"))
    assert isinstance(saved, Saved)
    assert saved.durable
    assert hit(a.lookup(KEY), "local") == b"compiled"
    assert a.flush(20).complete
    assert hit(b.lookup(KEY), "remote") == b"compiled"
    assert hit(b.lookup(KEY), "local") == b"compiled"


def test_bytes_are_as_good_as_a_frame(machine: Callable[..., Cache]) -> None:
    cache = machine()
    assert isinstance(cache.save(KEY, bytearray(entry(payload=b"compiled").data)), Saved)
    assert hit(cache.lookup(KEY), "local") == b"compiled"


def test_what_nobody_saved_is_absent(machine: Callable[..., Cache], remote: GatedStore) -> None:
    cache = machine()
    assert miss(cache.lookup(KEY)) == Reason.ABSENT
    assert remote.calls == [("get", FIRST)]


def test_one_entry_costs_one_get_and_no_list(machine: Callable[..., Cache]) -> None:
    a, b = machine("a"), machine("b")
    a.save(KEY, entry(variant="v"))
    a.flush(20)
    assert isinstance(b.lookup(KEY, variant_is("v")), Hit)
    assert isinstance(b.lookup(KEY, variant_is("v")), Hit)
    assert calls(b) == {"get": 1}


def test_without_a_local_tier_every_hit_is_remote(machine: Callable[..., Cache]) -> None:
    cache = machine(None)
    saved = cache.save(KEY, entry(payload=b"compiled"))
    assert isinstance(saved, Saved)
    assert not saved.durable
    assert cache.flush(20).complete
    assert hit(cache.lookup(KEY), "remote") == b"compiled"
    assert hit(cache.lookup(KEY), "remote") == b"compiled"


def test_without_a_remote_everything_is_local(machine: Callable[..., Cache]) -> None:
    cache = machine(store=None)
    assert miss(cache.lookup(KEY)) == Reason.ABSENT
    assert isinstance(cache.save(KEY, entry()), Saved)
    assert isinstance(cache.lookup(KEY), Hit)
    assert cache.flush(20).complete
    assert cache.prefetch([OTHER]).wait(20).complete
    assert cache.stats().breaker == "none"


def test_without_either_nothing_is_kept(machine: Callable[..., Cache]) -> None:
    cache = machine(None, None)
    assert miss(cache.lookup(KEY)) == Reason.ABSENT
    saved = cache.save(KEY, entry())
    assert isinstance(saved, NotSaved)
    assert (saved.reason, saved.error) == (Reason.DISABLED, None)


def test_places_do_not_mix_in_one_local_tier(tmp_path: Path) -> None:
    from tests.support.caching import settings

    with (
        Cache(settings(tmp_path), open_remote=MemoryStore, identity="trusted") as one,
        Cache(settings(tmp_path), open_remote=MemoryStore, identity="other") as two,
    ):
        one.save(KEY, entry())
        assert miss(two.lookup(KEY)) == Reason.ABSENT


def test_a_cache_by_url(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'shared'}"
    with Cache.open(url, local_dir=str(tmp_path / "a")) as a:
        a.save(KEY, entry(payload=b"compiled"))
    with Cache.open(url, local_dir=tmp_path / "b") as b:
        assert hit(b.lookup(KEY), "remote") == b"compiled"


@pytest.mark.parametrize("key", ["", "Not/legal", "a" * 200])
def test_an_illegal_key_is_refused_everywhere(machine: Callable[..., Cache], key: str) -> None:
    cache = machine()
    with pytest.raises(ConfigError):
        cache.lookup(key)
    with pytest.raises(ConfigError):
        cache.save(key, entry())
    with pytest.raises(ConfigError):
        cache.prefetch([key])


def test_what_is_no_frame_is_refused(machine: Callable[..., Cache]) -> None:
    with pytest.raises(CorruptError):
        machine().save(KEY, b"no frame")
    with pytest.raises(ConfigError, match="not the key in the frame"):
        machine().save(OTHER, entry(KEY))


# -- the network is not waited for


def test_a_save_does_not_wait_for_a_remote_that_hangs(
    machine: Callable[..., Cache], remote: GatedStore
) -> None:
    remote.is_open = False
    a = machine()
    assert isinstance(a.save(KEY, entry()), Saved)
    eventually(lambda: remote.waiting)  # it hangs
    assert isinstance(a.save(OTHER, entry(OTHER)), Saved)
    eventually(lambda: a.stats().pending == 2)
    remote.is_open = True
    assert a.flush(20).complete
    assert a.stats().pending == 0


def test_a_lookup_waits_so_long_and_the_late_result_still_lands(
    machine: Callable[..., Cache], remote: GatedStore, memory: MemoryStore, tmp_path: Path
) -> None:
    put(memory, FIRST, entry().data)
    remote.is_open = False
    cache = machine(lookup_timeout_s=0.02)
    assert miss(cache.lookup(KEY)) == Reason.TIMEOUT
    remote.is_open = True
    eventually(lambda: cache.stats().downloaded == 1)
    assert isinstance(cache.lookup(KEY), Hit)
    assert cache.stats().hits == {"local": 1, "remote": 0}
    assert calls(cache) == {"get": 1}


def test_lookups_at_once_share_one_download(
    machine: Callable[..., Cache],
    remote: GatedStore,
    memory: MemoryStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put(memory, FIRST, entry(payload=b"compiled").data)
    remote.is_open = False
    cache = machine()
    joined: list[str] = []
    join_download = RemoteTier._join

    async def counted(remote: RemoteTier, name: str) -> Any:
        joined.append(name)
        return await join_download(remote, name)

    monkeypatch.setattr(RemoteTier, "_join", counted)
    joins = [in_thread(lambda: cache.lookup(KEY)) for _ in range(8)]
    eventually(lambda: len(joined) == 8)
    remote.is_open = True
    assert all(isinstance(join(), Hit) for join in joins)
    assert calls(cache) == {"get": 1}


def test_a_prefetched_entry_is_a_local_hit(
    machine: Callable[..., Cache], memory: MemoryStore
) -> None:
    put(memory, FIRST, entry().data)
    cache = machine()
    report = cache.prefetch([KEY, OTHER]).wait(20)
    assert (report.found, report.absent, report.complete) == (1, 1, True)
    assert isinstance(cache.lookup(KEY), Hit)
    assert cache.stats().hits == {"local": 1, "remote": 0}
    assert cache.prefetch([KEY]).wait(20).present == 1


def test_a_lookup_is_not_stuck_behind_queued_prefetches(
    machine: Callable[..., Cache], remote: GatedStore, memory: MemoryStore
) -> None:
    put(memory, FIRST, entry().data)
    remote.is_open = False
    cache = machine(download_concurrency=2)
    prefetch = cache.prefetch([f"{number}" for number in range(30)])
    eventually(lambda: remote.waiting == 1)
    join = in_thread(lambda: cache.lookup(KEY))
    eventually(lambda: remote.waiting == 2)
    prefetch.cancel()
    remote.is_open = True
    assert isinstance(join(), Hit)


# -- several entries under one key


def test_variants_of_two_machines_both_stay_readable(machine: Callable[..., Cache]) -> None:
    a, b, c = machine("a"), machine("b"), machine("c")
    joins = [
        in_thread(lambda cache=cache, variant=variant: cache.save(KEY, entry(variant=variant)))
        for cache, variant in ((a, "va"), (b, "vb"))
    ]
    assert all(isinstance(join(), Saved) for join in joins)
    assert a.flush(20).complete
    assert b.flush(20).complete
    for variant in ("va", "vb"):
        found = c.lookup(KEY, variant_is(variant))
        assert isinstance(found, Hit)
        assert found.entry.header.variant == variant


def test_variants_survive_a_store_whose_create_is_racy(machine: Callable[..., Cache]) -> None:
    store = RacyStore()
    caches = [machine(f"m{number}", store) for number in range(4)]
    for number, cache in enumerate(caches):
        cache.save(KEY, entry(variant=f"v{number}"))
    for cache in caches:
        assert cache.flush(20).complete
    reader = machine("reader", store)
    for number in range(4):
        assert isinstance(reader.lookup(KEY, variant_is(f"v{number}")), Hit)


def test_the_same_variant_saved_twice_is_one_object(
    machine: Callable[..., Cache], memory: MemoryStore
) -> None:
    for name in ("a", "b"):
        cache = machine(name)
        for _ in range(2):
            cache.save(KEY, entry(variant="v"))
            assert cache.flush(20).complete
    assert list(memory._objects) == [FIRST]


def test_entries_that_the_caller_does_not_accept_are_guard_misses(
    machine: Callable[..., Cache],
) -> None:
    a, b = machine("a"), machine("b")
    for variant in ("v1", "v2"):
        a.save(KEY, entry(variant=variant))
    assert a.flush(20).complete
    seen: list[str] = []

    def refuse(found: Frame) -> bool:
        seen.append(found.header.variant)
        return False

    assert miss(b.lookup(KEY, refuse)) == Reason.GUARD
    assert sorted(seen) == ["v1", "v2"]  # each once
    assert miss(b.lookup(KEY, refuse)) == Reason.GUARD
    assert sorted(seen) == ["v1", "v1", "v2", "v2"]
    assert b.stats().downloaded == 2  # the second time they were here


def test_local_variants_are_asked_before_the_remote(machine: Callable[..., Cache]) -> None:
    cache = machine()
    for variant in ("", "v1", "v2"):
        cache.save(KEY, entry(variant=variant, payload=variant.encode()))
    for variant in ("", "v1", "v2"):
        assert hit(cache.lookup(KEY, variant_is(variant)), "local") == variant.encode()


def test_recache_looks_nothing_up_and_overwrites(
    machine: Callable[..., Cache], memory: MemoryStore
) -> None:
    a = machine("a")
    for variant in ("v1", "v2"):
        a.save(KEY, entry(variant=variant, payload=b"old"))
    assert a.flush(20).complete
    b = machine("b", recache=True)
    assert miss(b.lookup(KEY)) == Reason.FORCED
    b.save(KEY, entry(variant="v2", payload=b"new"))
    assert b.flush(20).complete
    c = machine("c")
    assert hit(c.lookup(KEY, variant_is("v1")), "remote") == b"old"
    assert hit(c.lookup(KEY, variant_is("v2")), "remote") == b"new"


# -- modes


@pytest.mark.parametrize(
    ("mode", "looks_up", "saves"),
    [
        ("read-write", True, True),
        ("read-only", True, False),
        ("write-only", False, True),
        ("off", False, False),
    ],
)
def test_modes(
    machine: Callable[..., Cache],
    memory: MemoryStore,
    mode: str,
    looks_up: bool,
    saves: bool,
) -> None:
    put(memory, FIRST, entry().data)
    cache = machine(mode=mode)
    found = cache.lookup(KEY)
    assert isinstance(found, Hit) if looks_up else miss(found) == Reason.DISABLED
    saved = cache.save(OTHER, entry(OTHER))
    if saves:
        assert isinstance(saved, Saved)
    else:
        assert isinstance(saved, NotSaved)
        assert saved.reason == Reason.DISABLED
    assert cache.prefetch([KEY]).wait(20).present == (1 if looks_up else 0)
    cache.flush(20)
    assert (entries.first_name(OTHER) in memory._objects) == saves


def test_a_reader_uploads_nothing_not_even_what_others_left(
    machine: Callable[..., Cache], memory: MemoryStore, remote: GatedStore
) -> None:
    remote.is_open = False
    writer = machine()
    writer.save(KEY, entry())
    writer.close(0)
    remote.is_open = True
    reader = machine(mode="read-only")
    assert isinstance(reader.lookup(KEY), Hit)
    assert miss(reader.lookup(OTHER)) == Reason.ABSENT
    reader.flush(20)
    reader.close()
    assert memory._objects == {}
    assert machine().flush(20).complete is True
    with machine() as later:
        later.start()
        eventually(lambda: FIRST in memory._objects)


# -- bytes that are not what they claim to be


def _forgeries() -> dict[str, tuple[str, bytes]]:
    good = entry()
    return {
        "a broken section": (FIRST, broken(good)),
        "a broken header": (FIRST, bytes(good.data[:50]) + b"\xff" + bytes(good.data[51:])),
        "cut short": (FIRST, bytes(good.data[:-1])),
        "nothing": (FIRST, b""),
        "something behind it": (FIRST, bytes(good.data) + b"x"),
        "no frame": (FIRST, b"<html>" * 100),
        "another key's entry": (FIRST, entry(OTHER).data),
    }


@pytest.mark.parametrize(("name", "data"), _forgeries().values(), ids=_forgeries())
def test_a_damaged_remote_entry_is_a_miss_and_the_next_save_replaces_it(
    machine: Callable[..., Cache],
    memory: MemoryStore,
    caplog: pytest.LogCaptureFixture,
    name: str,
    data: bytes,
) -> None:
    put(memory, name, bytes(data))
    a, b = machine("a"), machine("b")
    for _ in range(2):
        assert miss(a.lookup(KEY)) == Reason.CORRUPT
    assert len(caplog.records) == 1
    assert a.stats().set_aside["remote"] == 2
    a.save(KEY, entry(payload=b"fresh"))
    assert a.flush(20).complete
    assert hit(b.lookup(KEY), "remote") == b"fresh"


def test_an_entry_in_another_variants_place_is_corrupt(
    machine: Callable[..., Cache], memory: MemoryStore
) -> None:
    put(memory, FIRST, entry(variant="v1").data)
    put(memory, entries.variant_name(KEY, "v2"), entry(variant="v3").data)
    cache = machine()
    seen: list[str] = []
    found = cache.lookup(KEY, lambda found: bool(seen.append(found.header.variant)))
    assert miss(found) == Reason.CORRUPT
    assert seen == ["v1"]


def test_behind_a_damaged_first_entry_the_others_are_found(
    machine: Callable[..., Cache], memory: MemoryStore
) -> None:
    put(memory, FIRST, broken(entry(variant="v1")))
    put(memory, entries.variant_name(KEY, "v2"), entry(variant="v2").data)
    cache = machine()
    assert isinstance(cache.lookup(KEY), Hit)


@pytest.mark.parametrize("damage", [broken, lambda found: entry(OTHER).data, lambda found: b""])
def test_a_damaged_local_file_is_set_aside_and_had_again_from_the_remote(
    machine: Callable[..., Cache],
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
    assert len(os.listdir(tmp_path / "a" / "quarantine")) == 1
    assert len(caplog.records) == 1


def test_a_file_damaged_before_its_upload_is_not_uploaded(
    machine: Callable[..., Cache], remote: GatedStore, memory: MemoryStore, tmp_path: Path
) -> None:
    remote.is_open = False
    for number in range(8):  # as many as are uploaded at once
        machine().save(f"busy{number}", entry(f"busy{number}"))
    # So little memory that what waits is read back from the disk.
    cache = machine("b", upload_concurrency=1, upload_queue_max_bytes=entry().size)
    cache.save(KEY, entry())
    eventually(lambda: ("put", FIRST) in remote.calls)
    cache.save(OTHER, entry(OTHER))
    for file in local_files(tmp_path, "b"):
        if file.name.startswith(OTHER):
            file.write_bytes(broken(entry(OTHER)))
    remote.is_open = True
    assert cache.flush(20).remaining == 0
    assert FIRST in memory._objects
    assert entries.first_name(OTHER) not in memory._objects
    assert cache.stats().upload_failures == 1


# -- stores that fail


class Failing(MemoryStore):
    """Raises ``error`` from every call."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    async def get(self, key: str, admit: Any = None) -> Any:
        raise self.error

    async def get_range(self, key: str, start: int, length: int) -> Any:
        raise self.error

    async def put(self, *args: Any, **more: Any) -> None:
        raise self.error

    async def atomic_create(self) -> bool:
        raise self.error


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
def test_whatever_a_store_raises_is_a_miss_with_its_reason_and_one_warning(
    machine: Callable[..., Cache],
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    reason: Reason,
) -> None:
    cache = machine(store=Failing(error))
    for _ in range(3):
        found = cache.lookup(KEY)
        assert miss(found) == reason
        assert isinstance(found, Miss)
        assert found.error is error
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    # A mistake in s3cache comes with its traceback, other people's trouble without.
    assert bool(record.exc_info) == (reason is Reason.ERROR)
    assert cache.prefetch([KEY]).wait(20).failed == 1
    assert isinstance(cache.save(KEY, entry()), Saved)
    given_up = reason is Reason.CORRUPT
    assert cache.flush(20 if given_up else 0.2).remaining == (0 if given_up else 1)
    assert isinstance(cache.lookup(KEY, lambda found: False), Miss)
    found = cache.lookup(OTHER, lambda found: False)
    assert miss(found) == reason
    assert cache.stats().misses == {reason: 5}


def test_each_kind_of_problem_is_warned_of_once(
    machine: Callable[..., Cache], caplog: pytest.LogCaptureFixture
) -> None:
    store = Failing(TransientError("reset"))
    cache = machine(store=store)
    for error in (TransientError("x"), AccessDeniedError("y"), TransientError("z")) * 3:
        store.error = error
        cache.lookup(KEY)
    assert len(caplog.records) == 2


def test_a_guard_that_fails_is_a_miss(
    machine: Callable[..., Cache], caplog: pytest.LogCaptureFixture
) -> None:
    cache = machine()
    cache.save(KEY, entry())
    found = cache.lookup(KEY, lambda found: 1 / 0 > 1)
    assert miss(found) == Reason.ERROR
    assert caplog.records[0].exc_info


@pytest.mark.parametrize(
    "error", [ConfigError("store", "bad", "fix it"), AccessDeniedError("403"), RuntimeError("bug")]
)
def test_a_remote_that_cannot_be_opened_costs_no_save(
    tmp_path: Path, memory: MemoryStore, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    from tests.support.caching import settings

    broken_still = [True]

    def open_remote() -> MemoryStore:
        if broken_still:
            raise error
        return memory

    with Cache(settings(tmp_path), open_remote=open_remote, identity="place") as cache:
        for _ in range(2):
            assert isinstance(cache.lookup(OTHER), Miss)
            assert isinstance(cache.save(KEY, entry()), Saved)
        assert cache.prefetch([OTHER]).wait(20).failed == 1
        report = cache.flush(20)
        assert (report.remaining, report.error) == (1, error)
        assert isinstance(cache.lookup(KEY), Hit)
        # lookup, save or flush, prefetch
        assert len(caplog.records) == 3
        broken_still.clear()
        assert cache.flush(20).complete
    assert FIRST in memory._objects


def test_the_breaker_stops_asking_a_remote_that_fails(machine: Callable[..., Cache]) -> None:
    cache = machine(store=Failing(TransientError("reset")), breaker_failures=2)
    for _ in range(6):
        assert miss(cache.lookup(KEY)) == Reason.UNAVAILABLE
    assert calls(cache) == {"get": 2}
    assert cache.stats().breaker == "open"


# -- a local tier that fails


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

    for method in ("put", "put_all", "put_pending"):
        monkeypatch.setattr(cache._engine._disk.tier, method, fail)
    for number in range(3):
        saved = cache.save(f"key{number}", entry(f"key{number}"))
        assert isinstance(saved, Saved)
        assert not saved.durable
    assert cache.flush(20).complete
    assert len(memory._objects) == 4
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

    for method in ("get", "holds", "objects", "usage"):
        monkeypatch.setattr(cache._engine._disk.tier, method, fail)
    for _ in range(3):
        assert isinstance(cache.lookup(KEY), Hit)
    assert cache.stats().hits == {"local": 0, "remote": 3}
    assert cache.stats().local is None
    assert len(caplog.records) == 1


def test_a_local_directory_that_becomes_a_file(
    machine: Callable[..., Cache], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = machine()
    cache.save(KEY, entry())
    assert cache.flush(20).complete
    shutil.rmtree(tmp_path / "a")
    (tmp_path / "a").write_text("in the way")
    for number in range(3):
        saved = cache.save(f"key{number}", entry(f"key{number}"))
        assert isinstance(saved, Saved)
        assert not saved.durable
    assert isinstance(cache.lookup(KEY), Hit)
    assert cache.flush(20).complete
    assert len(caplog.records) == 1


def test_a_local_directory_that_is_removed_is_made_anew(
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


def test_without_a_remote_a_failing_disk_is_warned_of_once(
    machine: Callable[..., Cache],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = machine(store=None)

    def fail(*_: object) -> None:
        raise ReadOnlyError("read-only file system")

    monkeypatch.setattr(cache._engine._disk.tier, "put", fail)
    for _ in range(3):
        saved = cache.save(KEY, entry())
        assert isinstance(saved, NotSaved)
        assert saved.reason == Reason.UNAVAILABLE
        assert isinstance(saved.error, ReadOnlyError)
    assert len(caplog.records) == 1


def test_more_than_the_tier_holds_is_trimmed(machine: Callable[..., Cache]) -> None:
    cache = machine(local_max_files=50)
    for number in range(200):
        cache.save(f"key{number}", entry(f"key{number}"))
        if number % 10 == 0:
            assert cache.flush(20).complete
    assert cache.flush(20).complete
    local = cache.stats().local
    assert local is not None
    assert local.files <= 50
    assert isinstance(cache.lookup("key0"), Hit)


# -- counts


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


def test_lookups_add_up_over_threads(machine: Callable[..., Cache], memory: MemoryStore) -> None:
    for number in range(0, 20, 2):
        put(memory, entries.first_name(f"key{number}"), entry(f"key{number}").data)
    cache = machine()

    def work() -> int:
        found = [cache.lookup(f"key{number}") for number in range(20)]
        return sum(isinstance(each, Hit) for each in found)

    joins = [in_thread(work) for _ in range(4)]
    assert [join() for join in joins] == [10] * 4
    stats = cache.stats()
    assert stats.lookups == 80
    assert sum(stats.hits.values()) == 40
    assert stats.misses == {Reason.ABSENT: 40}


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


# -- the end of a cache


def test_closing_flushes(machine: Callable[..., Cache], memory: MemoryStore) -> None:
    cache = machine()
    cache.save(KEY, entry())
    assert cache.close().complete
    assert FIRST in memory._objects
    assert cache.close().complete


def test_a_closed_cache_is_disabled(machine: Callable[..., Cache]) -> None:
    cache = machine()
    cache.save(KEY, entry())
    cache.close()
    assert miss(cache.lookup(KEY)) == Reason.DISABLED
    saved = cache.save(KEY, entry())
    assert isinstance(saved, NotSaved)
    assert saved.reason == Reason.DISABLED
    assert cache.prefetch([KEY]).wait(20).complete
    assert cache.flush(20).complete
    cache.start()
    cache.stats()


def test_what_is_not_uploaded_at_the_end_is_by_the_next(
    machine: Callable[..., Cache], remote: GatedStore, memory: MemoryStore
) -> None:
    remote.is_open = False
    cache = machine()
    cache.save(KEY, entry())
    report = cache.close(0.01)
    assert (report.remaining, report.in_memory) == (1, 0)
    remote.is_open = True
    machine().start()
    eventually(lambda: FIRST in memory._objects)


def test_closing_while_others_look_up_and_save_hurts_nobody(
    machine: Callable[..., Cache], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(10):
        cache = machine(store=LatencyStore(MemoryStore(), 0.001))
        begun = threading.Barrier(5)

        def work(cache: Cache = cache, begun: threading.Barrier = begun) -> None:
            begun.wait(20)
            for number in range(40):
                cache.lookup(f"absent{number}")
                cache.save(f"key{number}", entry(f"key{number}"))
                cache.prefetch([f"more{number}"])

        joins = [in_thread(work) for _ in range(4)]
        begun.wait(20)
        cache.close(0)
        for join in joins:
            join()
        assert cache._engine._remote is None
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
    cache = open_cache(tmp_path, MemoryStore())
    cache.start()
    cache.save(KEY, entry())
    cache.lookup(OTHER)
    cache.prefetch([OTHER]).wait(20)
    cache.close()
    gone = weakref.ref(cache)
    del cache

    def collected() -> bool:
        gc.collect()
        return gone() is None

    eventually(collected)


# -- the end of a process, and forks


def test_at_exit_what_was_saved_is_uploaded(tmp_path: Path) -> None:
    done = run_script(
        """
        import pathlib
        cache = open_cache(pathlib.Path(sys.argv[1]), FileStore(sys.argv[2]))
        for number in range(20):
            cache.save(f"key{number}", entry(f"key{number}"))
        """,
        tmp_path / "tier",
        tmp_path / "remote",
    )
    assert (done.stdout, done.stderr) == ("", "")
    with open_cache(None, FileStore(tmp_path / "remote")) as reader:
        assert all(isinstance(reader.lookup(f"key{number}"), Hit) for number in range(20))


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
    assert warnings[1].endswith("1 are on record for the next process on this machine, 0 are lost")
    with open_cache(tmp_path, memory := MemoryStore()) as later:
        later.start()
        eventually(lambda: FIRST in memory._objects)


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
        assert "1 uploads to memory:// are unfinished: 0 are on record" in line
        assert line.endswith("1 are lost")


def test_a_killed_process_loses_nothing_it_acknowledged(tmp_path: Path) -> None:
    done = run_script(
        """
        import pathlib
        cache = open_cache(pathlib.Path(sys.argv[1]), Hanging())
        for number in range(10):
            saved = cache.save(f"key{number}", entry(f"key{number}"))
            if isinstance(saved, Saved) and saved.durable:
                print(f"key{number}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        tmp_path / "tier",
        check=False,
    )
    acknowledged = done.stdout.split()
    assert (done.returncode, len(acknowledged)) == (-9, 10)
    with open_cache(tmp_path / "tier", memory := MemoryStore()) as cache:
        cache.start()
        eventually(lambda: len(memory._objects) == 10)
    assert set(memory._objects) == {entries.first_name(key) for key in acknowledged}


FORK = """
import pathlib
remote = FileStore(sys.argv[2])
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
    """The child inherits neither the parent's transfers nor locks that nobody will release."""
    done = run_script(
        FORK.format(
            store="GatedStore(remote, is_open=False)",
            before="""
engine = cache._engine
gate = engine._open_remote()
cache.prefetch([f"key{number}" for number in range(40)])
eventually(lambda: gate.waiting == 2)
backlog = engine._remote.uploads.backlog
locks = [engine._mutex, engine._problems._mutex, engine._counters._mutex,
         engine._counters._miss_latency._lock, engine._listeners._mutex, background()._mutex,
         *backlog._record_locks, backlog._held._mutex, backlog._fresh._mutex,
         engine._disk.tier._pending._mutex, engine._disk.tier._bounds._accounts._mutex]
for lock in locks: lock.acquire()
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
    done = run_script(
        """
        cache = open_cache(None, MemoryStore())
        cache.close()
        child = os.fork()
        if child == 0:
            import s3cache.transfer._loop as module
            os._exit(len(module._closers) + isinstance(cache.lookup(KEY), Hit))
        assert join(child) == 0
        """
    )
    assert done.stderr == ""


# -- more about damage


def test_frames_of_another_version_are_not_read(
    machine: Callable[..., Cache], memory: MemoryStore
) -> None:
    data = bytearray(entry().data)
    data[9] = 99
    put(memory, FIRST, bytes(data))
    found = machine().lookup(KEY)
    assert miss(found) == Reason.CORRUPT
    assert f"reads {frame.VERSION}" in str(found.error)  # type: ignore[union-attr]


@pytest.mark.parametrize("fault", ["truncate", "bit_flip"])
def test_damage_on_the_way_is_never_a_hit(
    machine: Callable[..., Cache], memory: MemoryStore, fault: str
) -> None:
    put(memory, FIRST, entry(payload=b"compiled" * 50).data)
    faulty = FaultyStore(memory, seed=7)
    for number in range(30):
        faulty.inject("get", fault)
        found = machine(f"m{number}", faulty).lookup(KEY)
        assert miss(found) == Reason.CORRUPT
    cache = machine("last", faulty)
    assert hit(cache.lookup(KEY), "remote") == b"compiled" * 50


def test_several_variants_in_one_namespace_do_not_disturb_others(
    machine: Callable[..., Cache], memory: MemoryStore
) -> None:
    import asyncio

    cache = machine()
    for key in ("aa", "aab", "aa-b"):
        cache.save(key, entry(key, "v"))
    assert cache.flush(20).complete
    for key in ("aa", "aab", "aa-b"):
        assert asyncio.run(variants(memory, key)) == {"v"}
