"""S3Store keeps the contract on a real Ceph RADOS Gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from s3cache.errors import AccessDeniedError, MissingContainerError
from s3cache.store import RetryingStore, RetryPolicy, S3Options, S3Store, Store
from tests.support.buckets import RawBucket
from tests.support.contract import StoreContract

# RGW answers 500 to a read that meets an overwrite of the same object.
RETRIES = RetryPolicy(
    attempts=10, total_timeout_s=40, attempt_timeout_s=20, base_delay_s=0.01, max_delay_s=0.2
)

pytestmark = [pytest.mark.rgw]


class TestS3OnRGW(StoreContract):
    @pytest.fixture
    async def store(self, rgw_options: S3Options) -> AsyncIterator[Store]:
        store = RetryingStore(S3Store(rgw_options), RETRIES)
        yield store
        await store.aclose()

    @pytest.fixture
    def raw(self, rgw_options: S3Options) -> RawBucket:
        return RawBucket(rgw_options)


@pytest.fixture
async def store(rgw_options: S3Options) -> AsyncIterator[S3Store]:
    store = S3Store(rgw_options)
    yield store
    await store.aclose()


async def test_condition_is_found_to_be_honoured(store: S3Store) -> None:
    assert await store.atomic_create()


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
