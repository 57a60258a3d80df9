"""A damaged or foreign entry is a miss, and the next save replaces it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from s3cache import entries
from s3cache.cache import Cache, Hit
from s3cache.frame import Frame
from s3cache.stats import Reason
from s3cache.store import MemoryStore
from s3cache.tier import DiskTier
from tests.cache.answers import FIRST, Machines, hit, local_files, miss
from tests.support.caching import KEY, OTHER, broken, entry
from tests.support.faulty import Fault, FaultyStore
from tests.support.stores import names, put
from tests.support.waiting import LONG_S

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


@pytest.mark.parametrize("fault", ["truncate", "bit_flip"])
def test_damage_in_transit_is_never_a_hit(
    machine: Machines, memory: MemoryStore, fault: Fault
) -> None:
    put(memory, FIRST, entry(payload=b"compiled" * 50).data)
    faulty = FaultyStore(memory, seed=7)
    for number in range(30):
        faulty.inject("get", fault)
        found = machine(f"m{number}", faulty).lookup(KEY)
        assert miss(found) == Reason.CORRUPT
    cache = machine("last", faulty)
    assert hit(cache.lookup(KEY), "remote") == b"compiled" * 50


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
