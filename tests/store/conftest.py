"""A directory of objects, a failing store and an umask."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from s3cache.store import MemoryStore, ObjectFiles
from tests.support.faulty import FaultyStore


@pytest.fixture
def directory(root: Path) -> ObjectFiles:
    return ObjectFiles(root)


@pytest.fixture
def faulty(memory: MemoryStore) -> FaultyStore:
    return FaultyStore(memory)


@pytest.fixture
def group_umask() -> Iterator[None]:
    """Set the umask of many multi-user machines: the group may write new files."""
    before = os.umask(0o002)
    yield
    os.umask(before)
