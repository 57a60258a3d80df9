"""A store on a directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.shelves import Shelf

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "remote")
