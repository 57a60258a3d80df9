"""A store on a directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.shelves import Shelf


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "remote")
