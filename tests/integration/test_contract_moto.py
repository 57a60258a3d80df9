"""S3Store keeps the contract on moto.

``make test`` has one case of each test on the store as it is by default, ``make test-all`` the
others, and one case of each on a store that reads and writes all but small objects in parts.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from s3cache.store import RetryingStore, RetryPolicy, S3Options, S3Store, Store
from tests.support.buckets import RawBucket
from tests.support.contract import StoreContract
from tests.support.marks import slow

MIB = 1 << 20

# moto answers 500 to a read that meets an overwrite of the same object.
RETRIES = RetryPolicy(
    attempts=10, total_timeout_s=40, attempt_timeout_s=20, base_delay_s=0.01, max_delay_s=0.2
)


class TestS3OnMoto(StoreContract):
    secrets = ("testing-secret",)
    racers = 3  # moto checks and writes without a lock: among many, two may win
    parts: ClassVar[dict[str, Any]] = {}

    @pytest.fixture
    async def store(self, moto_options: S3Options) -> AsyncIterator[Store]:
        store = RetryingStore(S3Store(replace(moto_options, **self.parts)), RETRIES)
        yield store
        await store.aclose()

    @pytest.fixture
    def raw(self, moto_options: S3Options) -> RawBucket:
        return RawBucket(moto_options)


@slow
class TestS3InPartsOnMoto(TestS3OnMoto):
    """Every object over 1 MiB is read in ranges, every one over 5 MiB written in parts."""

    big_bytes = 6 * MIB + 3
    many = 30
    parts: ClassVar[dict[str, Any]] = {"part_bytes": MIB, "multipart_bytes": 5 * MIB}
