"""Machines that share a remote, all in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from s3cache.cache import Engine, set_current
from s3cache.store import MemoryStore
from tests.support.caching import open_cache

Start = Callable[..., Engine]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that opens the engine of a machine; all machines share a remote."""
    remote, engines = MemoryStore("memory://ports"), []

    def begin(name: str, **settings: Any) -> Engine:
        cache = open_cache(tmp_path / name, remote, **settings)
        set_current(cache)
        engines.append(cache.engine)
        return engines[-1]

    yield begin
    for each in engines:
        each.close()
