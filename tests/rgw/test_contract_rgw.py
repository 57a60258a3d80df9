"""S3Store obeys the contract of stores on a real Ceph RADOS Gateway."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from s3cache.errors import AccessDeniedError, MissingContainerError, PreconditionError
from s3cache.store import S3Options, S3Store, Store
from tests.support.buckets import RawBucket, retrying
from tests.support.contract import StoreContract

pytestmark = [pytest.mark.rgw]


class TestS3OnRGW(StoreContract):
    @pytest.fixture
    async def store(self, rgw_options: S3Options) -> AsyncIterator[Store]:
        async with retrying(rgw_options) as store:
            yield store

    @pytest.fixture
    def raw(self, rgw_options: S3Options) -> RawBucket:
        return RawBucket(rgw_options)


@pytest.fixture
async def store(rgw_options: S3Options) -> AsyncIterator[S3Store]:
    store = S3Store(replace(rgw_options, multipart_bytes=5 << 20))
    yield store
    await store.aclose()


async def test_the_first_create_shows_that_rgw_honours_the_condition(store: S3Store) -> None:
    await store.put("key", b"x", mode="create")
    assert await store.atomic_create()


async def test_a_bucket_with_object_lock_takes_every_kind_of_write(
    rgw_options: S3Options,
) -> None:
    """Writing, replacing and removing work, also in parts; every version stays."""
    raw = RawBucket(rgw_options)
    bucket = f"s3cache-lock-{uuid.uuid4().hex[:12]}"
    raw.client.create_bucket(Bucket=bucket, ObjectLockEnabledForBucket=True)
    retention = {"Mode": "GOVERNANCE", "Days": 1}
    rule = {"ObjectLockEnabled": "Enabled", "Rule": {"DefaultRetention": retention}}
    raw.client.put_object_lock_configuration(Bucket=bucket, ObjectLockConfiguration=rule)
    options = replace(rgw_options, bucket=bucket, multipart_bytes=5 << 20, part_bytes=5 << 20)
    store = S3Store(options)
    for key, body in (("small", b"x"), ("large", bytes(11 << 20))):
        await store.put(key, body, mode="create")
        await store.put(key, body[:-1])
        assert await store.get(key) == body[:-1]
        await store.delete(key)
        assert await store.get(key) is None
    versions = raw.client.list_object_versions(Bucket=bucket)
    assert {v["Key"].rpartition("/")[2] for v in versions["Versions"]} == {"small", "large"}
    await store.aclose()


async def test_a_large_object_is_written_in_parts_and_read_back(store: S3Store) -> None:
    body = os.urandom(40 << 20)
    await store.put("parts", body)
    assert await store.get("parts") == body


async def test_exactly_one_creator_of_a_large_object_wins(store: S3Store) -> None:
    """RGW ignores the condition at the end of a multipart upload, so one request must create it."""
    bodies = [os.urandom(6 << 20) for _ in range(4)]
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
async def test_errors_name_wrong_keys_and_buckets(
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
