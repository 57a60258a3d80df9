"""An entry of another key is no hit, however sound it is and wherever it is said to be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from s3cache.cache import Miss
from s3cache.store import MemoryStore, WrapperStore
from tests.support.caching import KEY, OTHER, entry, open_cache, payload

if TYPE_CHECKING:
    from pathlib import Path

    from s3cache.frame import Frame


class ListingAll(WrapperStore):
    """Lists everything, whatever it is asked for: a server to which the prefix is lost."""

    async def list_page(self, prefix: str, after: str | None = None) -> Any:
        return await self.inner.list_page("", after)


@pytest.mark.parametrize("has_disk", [True, False])
def test_what_a_store_lists_of_other_keys_is_not_offered(tmp_path: Path, has_disk: bool) -> None:
    """The caller looks at an entry's guards, and not at its key: that is ours to see to."""
    memory = MemoryStore()
    with open_cache(None, memory) as writer:
        for key, variant in [(KEY, "a"), (OTHER, "a"), (OTHER, "b")]:
            writer.save(key, entry(key, variant, f"{key} {variant}".encode()))
        assert writer.flush(20).complete
    reader = open_cache(tmp_path / "reader" if has_disk else None, ListingAll(memory))
    offered: list[str] = []

    def decline(candidate: Frame) -> bool:
        offered.append(payload(candidate).decode())
        return False

    found = reader.lookup(KEY, decline)
    assert isinstance(found, Miss)
    assert offered == [f"{KEY} a"]
    reader.close()
