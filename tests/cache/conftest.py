"""Machines that share one gated remote in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from s3cache.cache import Cache
from s3cache.store import MemoryStore
from tests.cache.answers import Machines
from tests.support.caching import open_cache
from tests.support.stores import GatedStore


@pytest.fixture
def remote(memory: MemoryStore) -> GatedStore:
    return GatedStore(memory)


@pytest.fixture
def machine(tmp_path: Path, remote: GatedStore) -> Iterator[Machines]:
    caches: list[Cache] = []

    def open_machine(name: str | None = "a", store: Any = remote, **changes: Any) -> Cache:
        caches.append(open_cache(tmp_path / name if name else None, store, **changes))
        return caches[-1]

    yield open_machine
    remote.is_open = True
    for cache in caches:
        cache.close(0)
