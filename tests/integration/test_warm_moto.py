"""Real compiles, shared through a moto server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.warm import WarmStart

if TYPE_CHECKING:
    from s3cache.store import S3Options


class TestWarmStartOverMoto(WarmStart):
    @pytest.fixture
    def place(self, moto_options: S3Options) -> S3Options:
        return moto_options
