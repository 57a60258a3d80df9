"""Entries are removed from both tiers for good, or replaced by better ones."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from s3cache import entries, frame
from s3cache.cache import Engine, Hit, Miss
from s3cache.errors import AccessDeniedError, ClosedError, ReadOnlyError
from s3cache.frame import Frame
from s3cache.store import MemoryStore
from tests.cache.answers import Machines
from tests.support.caching import KEY, OTHER, entry, open_cache, open_engine
from tests.support.stores import DenyingStore, GatedStore, names, put, remove
from tests.support.waiting import LONG_S


def test_removing_a_key_removes_all_its_variants_and_clearing_all_keys(tmp_path: Path) -> None:
    remote = MemoryStore()
    with open_cache(tmp_path / "here", remote) as cache:
        for variant in ("", "v1", "v2"):
            cache.save(KEY, entry(variant=variant))
        cache.save(OTHER, entry(OTHER))
        assert cache.flush(20).complete
        assert cache.remove(KEY) >= 3
        assert isinstance(cache.lookup(KEY), Miss)
        assert isinstance(cache.lookup(OTHER), Hit)
        assert (cache.remove(KEY), len(names(remote))) == (0, 1)
        cache.save(KEY, entry())
        assert cache.clear() >= 2
        assert isinstance(cache.lookup(KEY), Miss)
    assert names(remote) == []


def test_entries_are_removed_without_one_of_the_tiers(tmp_path: Path) -> None:
    """Without a local tier, uploads wait in memory."""
    remote = MemoryStore()
    for here, store in ((None, remote), (tmp_path / "here", None)):
        with open_cache(here, store) as cache:
            cache.save(KEY, entry())
            assert cache.remove(KEY) == 1
            assert isinstance(cache.lookup(KEY), Miss)
            cache.flush(20)
    assert names(remote) == []


@pytest.mark.parametrize("strict", [False, True])
def test_clearing_raises_if_the_remote_refuses_to_delete(
    tmp_path: Path, memory: MemoryStore, strict: bool
) -> None:
    """The entries that it does not refuse to delete are gone."""
    remote = DenyingStore(memory, lambda verb, key: verb == "delete" and f"/{KEY}." in key)
    with open_cache(tmp_path / "here", remote, strict=strict) as cache:
        cache.save(KEY, entry())
        cache.save(OTHER, entry(OTHER))
        with pytest.raises(AccessDeniedError):
            cache.clear()
        assert isinstance(cache.lookup(KEY), Hit)
    assert len(names(memory)) == 1


@pytest.mark.parametrize("mode", ["read-only", "off", None])
def test_removing_needs_the_right_to_write_and_an_open_cache(
    tmp_path: Path, mode: str | None
) -> None:
    cache = open_cache(tmp_path / "here", MemoryStore(), **({"mode": mode} if mode else {}))
    if mode is None:
        cache.close()
    with pytest.raises(ReadOnlyError if mode else ClosedError):
        cache.remove(KEY)
    cache.close()


# -- the first name of a key is removed before the others


def with_two_variants(remote: MemoryStore, *keys: str) -> None:
    """Put two entries under each key, and remove nothing."""
    for key in keys:
        put(remote, entries.first_name(key), entry(key, variant="a").data)
        put(remote, entries.variant_name(key, "b"), entry(key, variant="b").data)


@pytest.mark.parametrize("mode", ["read-write", "read-only"])
def test_variants_are_found_after_the_first_entry_was_removed(machine: Machines, mode: str) -> None:
    """As a rule of the bucket does, which removes the oldest objects first."""
    remote = MemoryStore()
    keys = [f"{number:02}" * 32 for number in range(40)]
    with_two_variants(remote, *keys)
    for key in keys:
        remove(remote, entries.first_name(key))
    cache = machine("a", remote, mode=mode)
    for key in keys:
        found = cache.lookup(key)
        assert isinstance(found, Hit)
        assert found.entry.header.variant == "b"


def test_ordinary_hits_and_misses_take_one_request(
    machine: Machines, remote: GatedStore, memory: MemoryStore
) -> None:
    """A process that may save learns soon that the first names were not removed."""
    keys = [f"{number:02}" * 32 for number in range(80)]
    with_two_variants(memory, keys[0], keys[70])
    remove(memory, entries.first_name(keys[70]))
    cache = machine("a")
    assert isinstance(cache.lookup(keys[0]), Hit)
    assert remote.calls == [("get", entries.first_name(keys[0]))]
    assert {cache.lookup(key).reason for key in keys[1:60]} == {"absent"}  # type: ignore[union-attr]
    assert (remote.count("get"), remote.count("list")) == (60, 16)
    cache.save(keys[70], entry(keys[70], variant="c"))  # which others see beside the first
    cache.flush(20)
    reader = machine("b", mode="read-only")
    remote.calls.clear()
    assert isinstance(reader.lookup(keys[70], lambda it: it.header.variant == "b"), Hit)
    assert {reader.lookup(key).reason for key in keys[1:60]} == {"absent"}  # type: ignore[union-attr]
    assert remote.count("list") == 1 + 59  # nothing that it saves could help later processes


def test_a_key_without_entries_is_absent_even_if_nothing_may_be_listed(
    machine: Machines, memory: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    cache = machine("a", DenyingStore(memory, lambda verb, _: verb == "list"), strict=True)
    assert isinstance(found := cache.lookup(KEY), Miss)
    assert found.reason == "absent"
    assert caplog.records == []


FIRST, BETTER = entry(payload=b"first" * 40), entry(payload=b"better" * 40)


@pytest.fixture
def engine(tmp_path: Path, memory: MemoryStore) -> Iterator[Engine]:
    with open_engine(tmp_path / "a", memory) as engine:
        yield engine


def found(memory: MemoryStore) -> Frame:
    """Return the only entry in the remote."""
    (name,) = names(memory)
    data = asyncio.run(memory.get(name))
    assert data is not None
    return frame.decode(data)


def replaced(engine: Engine) -> None:
    engine.replace(FIRST, bytes(BETTER.data))
    assert engine.flush(LONG_S).complete


@pytest.mark.parametrize("is_uploaded", [False, True])
def test_a_better_entry_replaces_an_uploaded_one_or_is_uploaded_in_its_place(
    engine: Engine, memory: MemoryStore, is_uploaded: bool
) -> None:
    engine.save(KEY, FIRST, delayed=True)
    if is_uploaded:
        assert engine.flush(LONG_S).complete
    replaced(engine)
    assert found(memory).digest == BETTER.digest
    assert (engine.stats().uploaded, engine.stats().saved) == (1 + is_uploaded, 1)
    with engine.candidates(KEY, remote=False) as lookup:
        assert [hit.entry.digest for hit in lookup] == [BETTER.digest]


def test_a_fetched_entry_is_replaced_on_this_machine_too(
    engine: Engine, memory: MemoryStore, tmp_path: Path
) -> None:
    engine.save(KEY, FIRST)
    assert engine.flush(LONG_S).complete
    with open_engine(tmp_path / "b", memory) as other:
        with other.candidates(KEY) as lookup:
            assert [hit.entry.digest for hit in lookup] == [FIRST.digest]
        replaced(other)
        with other.candidates(KEY, remote=False) as lookup:
            assert [hit.entry.digest for hit in lookup] == [BETTER.digest]


def test_an_entry_of_another_machine_is_not_replaced(
    engine: Engine, memory: MemoryStore, tmp_path: Path
) -> None:
    engine.save(KEY, FIRST, delayed=True)
    others = open_engine(tmp_path / "b", memory)
    theirs = entry(payload=b"as good" * 40)
    others.save(KEY, theirs)
    assert others.flush(LONG_S).complete
    replaced(engine)
    assert found(memory).digest == theirs.digest
    others.close()


@pytest.mark.parametrize("way", ["flush", "close"])
def test_replacements_made_while_finishing_are_uploaded(
    engine: Engine, memory: MemoryStore, way: str
) -> None:
    engine.save(KEY, FIRST, delayed=True)
    engine.events.finishing.subscribe(lambda: engine.replace(FIRST, bytes(BETTER.data)))
    getattr(engine, way)(LONG_S)
    assert found(memory).digest == BETTER.digest


def test_a_read_only_machine_replaces_nothing(tmp_path: Path, memory: MemoryStore) -> None:
    with open_engine(tmp_path / "a", memory, mode="read-only") as engine:
        replaced(engine)
    assert names(memory) == []
