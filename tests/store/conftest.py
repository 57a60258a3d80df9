"""A directory of objects."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from s3cache.store import ObjectFiles

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def directory(root: Path) -> ObjectFiles:
    return ObjectFiles(root)


@pytest.fixture
def group_umask() -> Iterator[None]:
    """The umask of many multi-user machines: what is made may be written by the group."""
    before = os.umask(0o002)
    yield
    os.umask(before)
