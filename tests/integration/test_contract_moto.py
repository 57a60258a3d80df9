"""S3Store obeys the contract of stores on moto.

``make test`` runs one case of each test on a store with default options. ``make test-all`` runs the
other cases, and one case of each test on a store that reads and writes larger objects in parts.
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

# moto answers 500 to a read during an overwrite of the same object.
RETRIES = RetryPolicy(
    attempts=10, total_timeout_s=40, attempt_timeout_s=20, base_delay_s=0.01, max_delay_s=0.2
)


class TestS3OnMoto(StoreContract):
    secrets = ("testing-secret",)
    racers = 3  # moto checks and writes without a lock: with more racers, two may win
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
    """Objects over 1 MiB are read in ranges, and objects over 5 MiB are written in parts."""

    big_bytes = 6 * MIB + 3
    many = 30
    parts: ClassVar[dict[str, Any]] = {"part_bytes": MIB, "multipart_bytes": 5 * MIB}
