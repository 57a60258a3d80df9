"""Real compiles, shared through a real Ceph RADOS Gateway."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.marks import nightly
from tests.support.warm import WarmStart

if TYPE_CHECKING:
    from s3cache.store import S3Options

pytestmark = pytest.mark.rgw


@nightly  # moto's server has the same in `make test-all`
class TestWarmStartOverRGW(WarmStart):
    @pytest.fixture
    def place(self, rgw_options: S3Options) -> S3Options:
        return rgw_options
