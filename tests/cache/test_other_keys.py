"""A frame that names another key than it is offered under is refused, whichever way it comes in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from s3cache import entries
from s3cache.cache import Cache, Hit
from s3cache.stats import Reason
from s3cache.store import FileStore, MemoryStore
from s3cache.tier import DiskTier
from tests.cache.answers import FIRST, hit, local_files, miss
from tests.support.caching import KEY, OTHER, entry
from tests.support.stores import names, put
from tests.support.waiting import LONG_S

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FOREIGN = bytes(entry(OTHER).data)


def test_from_the_disk(machine: Callable[..., Cache], tmp_path: Path) -> None:
    cache = machine("a", None)
    cache.save(KEY, entry())
    (file,) = local_files(tmp_path)
    file.write_bytes(FOREIGN)
    assert miss(cache.lookup(KEY)) == Reason.CORRUPT
    assert cache.stats().set_aside["local"] == 1


@pytest.mark.parametrize("name", [FIRST, entries.variant_name(KEY, "v")], ids=["first", "listed"])
def test_from_the_remote(
    machine: Callable[..., Cache], memory: MemoryStore, tmp_path: Path, name: str
) -> None:
    put(memory, FIRST, entry(variant="other").data)
    put(memory, name, FOREIGN)
    cache = machine()
    assert miss(cache.lookup(KEY, lambda found: found.header.key != KEY)) == Reason.CORRUPT
    assert FOREIGN not in [file.read_bytes() for file in local_files(tmp_path)]


def test_from_a_prefetch(
    machine: Callable[..., Cache], memory: MemoryStore, tmp_path: Path
) -> None:
    put(memory, FIRST, FOREIGN)
    cache = machine()
    assert cache.prefetch([KEY]).wait(LONG_S).failed == 1
    assert local_files(tmp_path) == []
    assert miss(cache.lookup(KEY)) == Reason.CORRUPT


def test_from_a_shared_directory(machine: Callable[..., Cache], tmp_path: Path) -> None:
    with_it = FileStore(str(tmp_path / "shared"), create=True)
    put(with_it, FIRST, FOREIGN)
    assert miss(machine("a", with_it).lookup(KEY)) == Reason.CORRUPT


def test_from_what_another_process_has_left(
    machine: Callable[..., Cache], memory: MemoryStore, tmp_path: Path
) -> None:
    """It is not uploaded, and not served."""
    cache = machine("a")
    namespace = cache_namespace(tmp_path / "a", cache)
    cache.close()
    dead = DiskTier(tmp_path / "a", namespace=namespace, max_bytes=1 << 20, max_files=100)
    dead.put_pending(entries.variant_name(KEY, ""), FOREIGN)
    dead.close()
    heir = machine("a")
    heir.start()
    assert heir.flush(20).remaining == 0
    assert names(memory) == [entries.first_name("named")]
    assert not isinstance(heir.lookup(KEY), Hit)


def cache_namespace(root: Path, cache: Cache) -> str:
    """The directory in which a cache keeps what is of its remote."""
    cache.save("named", entry("named"))
    assert cache.flush(20).complete
    assert hit(cache.lookup("named"), "local")
    (namespace,) = [path.name.rstrip("+") for path in (root / "objects").iterdir()]
    return namespace
