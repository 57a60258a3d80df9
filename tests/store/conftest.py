"""A directory of objects."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from s3cache.store import ObjectFiles


@pytest.fixture
def directory(root: Path) -> ObjectFiles:
    return ObjectFiles(root)


@pytest.fixture
def group_umask() -> Iterator[None]:
    """The umask of many multi-user machines: what is made may be written by the group."""
    before = os.umask(0o002)
    yield
    os.umask(before)
