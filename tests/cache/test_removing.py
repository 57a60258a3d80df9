"""``Cache.remove`` and ``Cache.clear`` remove entries from both tiers for good."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from s3cache.cache import Hit, Miss
from s3cache.errors import AccessDeniedError, ClosedError, ConfigError, ReadOnlyError
from s3cache.store import MemoryStore
from tests.support.caching import KEY, OTHER, entry, open_cache
from tests.support.stores import names


def test_removing_a_key_removes_all_its_variants_and_no_other_key(tmp_path: Path) -> None:
    remote = MemoryStore()
    with open_cache(tmp_path / "here", remote) as cache:
        for variant in ("", "v1", "v2"):
            cache.save(KEY, entry(variant=variant))
        cache.save(OTHER, entry(OTHER))
        assert cache.flush(20).complete
        assert cache.remove(KEY) >= 3
        assert isinstance(cache.lookup(KEY), Miss)
        assert isinstance(cache.lookup(OTHER), Hit)
        assert cache.remove(KEY) == 0
    assert len(names(remote)) == 1


def test_clearing_removes_every_entry_from_both_tiers(tmp_path: Path) -> None:
    remote = MemoryStore()
    with open_cache(tmp_path / "here", remote) as cache:
        cache.save(KEY, entry())
        cache.save(OTHER, entry(OTHER))
        assert cache.clear() >= 2
        assert isinstance(cache.lookup(KEY), Miss)
    assert names(remote) == []


def test_a_removed_entry_is_not_uploaded_from_the_queue(tmp_path: Path) -> None:
    """Without a local tier, uploads wait in memory."""
    remote = MemoryStore()
    with open_cache(None, remote) as cache:
        cache.save(KEY, entry())
        assert cache.remove(KEY) == 1
        cache.flush(20)
    assert names(remote) == []


def test_without_a_remote_the_local_tier_is_cleared(tmp_path: Path) -> None:
    with open_cache(tmp_path / "here", None) as cache:
        cache.save(KEY, entry())
        assert cache.remove(KEY) == 1
        assert isinstance(cache.lookup(KEY), Miss)


class _Keeping(MemoryStore):
    async def delete(self, key: str) -> None:
        if f"/{KEY}." in key:
            raise AccessDeniedError("not allowed", op="delete", store=self.url, key=key)
        await super().delete(key)


@pytest.mark.parametrize("strict", [False, True])
def test_clearing_raises_if_the_remote_refuses_to_delete(tmp_path: Path, strict: bool) -> None:
    """The entries that it does not refuse to delete are gone."""
    remote = _Keeping()
    with open_cache(tmp_path / "here", remote, strict=strict) as cache:
        cache.save(KEY, entry())
        cache.save(OTHER, entry(OTHER))
        with pytest.raises(AccessDeniedError):
            cache.clear()
        assert isinstance(cache.lookup(KEY), Hit)
    assert len(names(remote)) == 1


@pytest.mark.parametrize("changes", [{"mode": "read-only"}, {"mode": "off"}])
def test_removing_needs_the_right_to_write(tmp_path: Path, changes: dict[str, Any]) -> None:
    with (
        open_cache(tmp_path / "here", MemoryStore(), **changes) as cache,
        pytest.raises(ReadOnlyError),
    ):
        cache.remove(KEY)


def test_removing_raises_for_bad_keys_and_closed_caches(tmp_path: Path) -> None:
    cache = open_cache(tmp_path / "here", MemoryStore())
    with pytest.raises(ConfigError):
        cache.remove("../x")
    cache.close()
    with pytest.raises(ClosedError):
        cache.clear()
