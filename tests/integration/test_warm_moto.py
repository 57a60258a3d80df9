"""Real compiles, shared through a moto server."""

from __future__ import annotations

import pytest

from s3cache.store import S3Options
from tests.support.warm import WarmStart


class TestWarmStartOverMoto(WarmStart):
    @pytest.fixture
    def place(self, moto_options: S3Options) -> S3Options:
        return moto_options
