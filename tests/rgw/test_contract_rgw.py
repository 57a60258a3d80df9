"""S3Store keeps the contract on a real Ceph RADOS Gateway.

``make test`` has one case of each test on the store as it is by default, ``make test-all`` the
others. A store that reads all but small objects in ranges has one case of each in
``make test-all``, and the others at night.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from s3cache.errors import AccessDeniedError, MissingContainerError, PreconditionError
from s3cache.store import RetryingStore, RetryPolicy, S3Options, S3Store, Store
from s3cache.testing.contract import StoreContract
from tests.support.buckets import RawBucket
from tests.support.marks import slow

MIB = 1 << 20

# RGW answers 500 to a read that meets an overwrite of the same object.
RETRIES = RetryPolicy(
    attempts=10, total_timeout_s=40, attempt_timeout_s=20, base_delay_s=0.01, max_delay_s=0.2
)

pytestmark = [pytest.mark.rgw]


class TestS3OnRGW(StoreContract):
    parts: ClassVar[dict[str, Any]] = {}

    @pytest.fixture
    async def store(self, rgw_options: S3Options) -> AsyncIterator[Store]:
        store = RetryingStore(S3Store(replace(rgw_options, **self.parts)), RETRIES)
        yield store
        await store.aclose()

    @pytest.fixture
    def raw(self, rgw_options: S3Options) -> RawBucket:
        return RawBucket(rgw_options)


@slow
class TestS3InPartsOnRGW(TestS3OnRGW):
    """Every object over 1 MiB is read in ranges."""

    big_bytes = 12 * MIB + 3
    many = 30
    parts: ClassVar[dict[str, Any]] = {"part_bytes": MIB}


@pytest.fixture
async def store(rgw_options: S3Options) -> AsyncIterator[S3Store]:
    store = S3Store(rgw_options)
    yield store
    await store.aclose()


async def test_condition_is_found_to_be_honoured(store: S3Store) -> None:
    assert await store.atomic_create()


async def test_one_creator_of_a_large_object_wins(store: S3Store) -> None:
    bodies = [os.urandom(6 * MIB) for _ in range(4)]
    results = await asyncio.gather(
        *(store.put("large", body, mode="create") for body in bodies), return_exceptions=True
    )
    lost = [result for result in results if result is not None]
    assert len(lost) == 3
    assert all(isinstance(error, PreconditionError) for error in lost)
    assert await store.get("large") == bodies[results.index(None)]


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ({"secret_key": "wrong"}, AccessDeniedError, "secret key is wrong"),
        ({"access_key": "nobody"}, AccessDeniedError, "access key is not known"),
        ({"bucket": "s3cache-no-such-bucket"}, MissingContainerError, "does not exist"),
    ],
)
async def test_a_mistake_is_named(
    rgw_options: S3Options, wrong: dict[str, Any], error: type[Exception], says: str
) -> None:
    store = S3Store(replace(rgw_options, **wrong))
    for call in (store.get("key"), store.put("key", b"x"), store.put("key", b"x", mode="create")):
        with pytest.raises(error, match=says):
            await call
    await store.aclose()


async def test_no_region_is_needed(rgw_options: S3Options) -> None:
    store = S3Store(replace(rgw_options, region=None))
    await store.put("key", b"x")
    assert await store.get("key") == b"x"
    await store.aclose()
