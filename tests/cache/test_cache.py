"""Saves and lookups across machines, in each mode, and arguments that are refused."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from s3cache import entries
from s3cache.cache import Cache, Hit, Miss, NotSaved, Saved
from s3cache.errors import ConfigError, CorruptError
from s3cache.frame import Frame
from s3cache.stats import Reason
from s3cache.store import MemoryStore
from tests.cache.answers import FIRST, Machines, calls, hit, miss, variant_is
from tests.support.caching import KEY, OTHER, entry, settings
from tests.support.stores import GatedStore, holds, names, put
from tests.support.waiting import LONG_S, eventually


def test_a_machine_finds_the_entries_of_another(machine: Machines) -> None:
    """One entry costs one GET and no list."""
    a, b = machine("a"), machine("b")
    saved = a.save(KEY, entry(payload=b"compiled", variant="v"))
    assert isinstance(saved, Saved)
    assert saved.durable
    assert hit(a.lookup(KEY), "local") == b"compiled"
    assert a.flush(20).complete
    assert hit(b.lookup(KEY, variant_is("v")), "remote") == b"compiled"
    assert hit(b.lookup(KEY, variant_is("v")), "local") == b"compiled"
    assert calls(b) == {"get": 1}


def test_a_key_that_was_never_saved_is_absent(machine: Machines, remote: GatedStore) -> None:
    cache = machine()
    assert miss(cache.lookup(KEY)) == Reason.ABSENT
    assert remote.calls == [("get", FIRST), ("list", entries.name_prefix(KEY))]


def test_without_a_tier_the_other_one_serves_all_and_without_both_nothing_is_kept(
    machine: Machines,
) -> None:
    cache = machine(None)
    saved = cache.save(KEY, entry(payload=b"compiled"))
    assert isinstance(saved, Saved)
    assert not saved.durable
    assert cache.flush(20).complete
    for _ in range(2):
        assert hit(cache.lookup(KEY), "remote") == b"compiled"
    cache = machine(store=None)
    assert miss(cache.lookup(KEY)) == Reason.ABSENT
    assert isinstance(cache.save(KEY, entry()), Saved)
    assert isinstance(cache.lookup(KEY), Hit)
    assert cache.flush(20).complete
    assert cache.prefetch([OTHER]).wait(LONG_S).complete
    assert cache.stats().breaker == "none"
    cache = machine(None, None)
    assert miss(cache.lookup(KEY)) == Reason.ABSENT
    nothing = cache.save(KEY, entry())
    assert isinstance(nothing, NotSaved)
    assert (nothing.reason, nothing.error) == (Reason.DISABLED, None)


def test_entries_of_different_remotes_do_not_mix_in_one_local_tier(tmp_path: Path) -> None:
    with (
        Cache(settings(tmp_path), open_remote=MemoryStore, identity="trusted") as one,
        Cache(settings(tmp_path), open_remote=MemoryStore, identity="other") as two,
    ):
        one.save(KEY, entry())
        assert miss(two.lookup(KEY)) == Reason.ABSENT


def test_an_unsafe_default_directory_is_replaced_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If its substitute is unsafe too, there is no tier (``tests/trust/test_directories.py``)."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "cache" / "s3cache").mkdir(parents=True)
    (tmp_path / "cache" / "s3cache").chmod(0o777)
    url = f"file://{tmp_path / 'shared'}"
    with Cache.open(url) as cache:
        assert isinstance(cache.save(KEY, entry()), Saved)
        assert hit(cache.lookup(KEY), "local")
    (place,) = (tmp_path / "temporary").iterdir()
    (record,) = caplog.records
    assert f"goes to {place}" in record.message
    assert "can be written by others" in record.message


@pytest.mark.parametrize("key", ["", "Not/legal", "a" * 200])
def test_illegal_keys_and_invalid_frames_are_refused(machine: Machines, key: str) -> None:
    cache = machine()
    calls = cache.lookup, cache.remove, lambda key: cache.save(key, entry())
    for call in (*calls, lambda key: cache.prefetch([key])):
        with pytest.raises(ConfigError):
            call(key)
    with pytest.raises(CorruptError):
        cache.save(KEY, b"no frame")
    with pytest.raises(ConfigError, match="not the key in the frame"):
        cache.save(OTHER, entry(KEY))


@pytest.mark.parametrize(
    ("mode", "looks_up", "saves"),
    [
        ("read-write", True, True),
        ("read-only", True, False),
        ("write-only", False, True),
        ("off", False, False),
    ],
)
def test_a_mode_decides_which_calls_use_the_cache(
    machine: Machines, memory: MemoryStore, mode: str, looks_up: bool, saves: bool
) -> None:
    put(memory, FIRST, entry().data)
    cache = machine(mode=mode)
    found = cache.lookup(KEY)
    assert isinstance(found, Hit) if looks_up else miss(found) == Reason.DISABLED
    saved = cache.save(OTHER, entry(OTHER))
    assert isinstance(saved, Saved if saves else NotSaved)
    assert saves or cache.stats().not_saved == {Reason.DISABLED: 1}
    assert cache.prefetch([KEY]).wait(LONG_S).present == (1 if looks_up else 0)
    cache.flush(20)
    assert holds(memory, entries.first_name(OTHER)) == saves


def test_a_reader_does_not_upload_entries_that_a_writer_left(
    machine: Machines, memory: MemoryStore, remote: GatedStore
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
    assert names(memory) == []
    assert machine().flush(20).complete is True
    with machine() as later:
        later.start()
        eventually(lambda: holds(memory, FIRST))


# -- statistics of lookups, saves and transfers


def test_lookups_saves_and_transfers_are_counted(machine: Machines, memory: MemoryStore) -> None:
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
    both = 2, one.size + two.size
    assert (saved.saved, saved.saved_bytes) == (saved.uploaded, saved.uploaded_bytes) == both
    assert saved.save_latency.count == 2
    assert looked.hits == {"local": 1, "remote": 2}
    assert looked.hit_bytes == {"local": one.size, "remote": one.size + two.size}
    assert looked.misses == {Reason.ABSENT: 1, Reason.GUARD: 1, Reason.CORRUPT: 1}
    assert looked.lookups == 6
    assert (looked.downloaded, looked.downloaded_bytes) == both
    assert {tier: of.count for tier, of in looked.hit_latency.items()} == looked.hits
    assert looked.miss_latency.count == 3
    assert looked.remote["get"].bytes_in == one.size + two.size + len(b"no frame")
    assert looked.local is not None
    assert looked.local.files == 2
    assert looked.set_aside == {"local": 0, "remote": 1}


def test_a_lookup_by_a_listener_is_a_miss_not_a_hang(machine: Machines) -> None:
    cache = machine()
    found: list[Hit | Miss] = []
    cache.subscribe(lambda event: found.append(cache.lookup(OTHER)))
    cache.save(KEY, entry())
    assert cache.flush(20).complete
    assert {miss(result) for result in found} == {Reason.ERROR}


# -- several entries under one key: none is lost, and only accepted ones are returned


def test_entries_that_the_caller_does_not_accept_are_guard_misses(machine: Machines) -> None:
    a, b = machine("a"), machine("b")
    for variant in ("v1", "v2"):
        a.save(KEY, entry(variant=variant))
    assert a.flush(20).complete
    seen: list[str] = []

    def refuse(found: Frame) -> bool:
        seen.append(found.header.variant)
        return False

    assert miss(b.lookup(KEY, refuse)) == Reason.GUARD
    assert sorted(seen) == ["v1", "v2"]  # each variant once
    assert miss(b.lookup(KEY, refuse)) == Reason.GUARD
    assert sorted(seen) == ["v1", "v1", "v2", "v2"]
    assert b.stats().downloaded == 2  # the second lookup found them on the disk


def test_recache_skips_lookups_and_overwrites(machine: Machines, memory: MemoryStore) -> None:
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
