"""Create buckets, which s3cache never does, and access their objects with plain boto."""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from s3cache.store import RetryingStore, RetryPolicy, S3Options, S3Store, Store
from s3cache.testing import MotoServer

# moto and RGW answer 500 to a read during an overwrite of the same object.
_RETRIES = RetryPolicy(
    attempts=10, total_timeout_s=40, attempt_timeout_s=20, base_delay_s=0.01, max_delay_s=0.2
)


@asynccontextmanager
async def retrying(options: S3Options) -> AsyncIterator[Store]:
    """Open a store for the block that tries failed requests again."""
    store = RetryingStore(S3Store(options), _RETRIES)
    try:
        yield store
    finally:
        await store.aclose()


def moto_place(server: MotoServer) -> S3Options:
    """Create a bucket on a moto server; return its options, with credentials."""
    options = asdict(server.make_bucket())
    return S3Options(options.pop("name"), **options)


def rgw_place(name: str) -> S3Options | None:
    """Create a bucket on the Ceph RGW that the environment names; return its options."""
    if "S3CACHE_TEST_RGW_ENDPOINT" not in os.environ:
        return None
    server: dict[str, Any] = {
        option: os.environ[f"S3CACHE_TEST_RGW_{variable}"]
        for option, variable in (
            ("endpoint_url", "ENDPOINT"), ("access_key", "ACCESS_KEY"), ("secret_key", "SECRET_KEY")
        )
    }  # fmt: skip
    options = S3Options(f"{name}-{uuid.uuid4().hex[:12]}", region="us-east-1", **server)
    RawBucket(options).client.create_bucket(Bucket=options.bucket)
    return options


@lru_cache
def _client(endpoint_url: str, access_key: str, secret_key: str) -> Any:
    """Return one client for all tests: creating it takes longer than most tests."""
    import boto3

    return boto3.client(
        "s3",
        endpoint_url=endpoint_url,
        region_name="us-east-1",
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
    )


class RawBucket:
    """The objects under a store's prefix, accessed with plain boto."""

    def __init__(self, options: S3Options) -> None:
        assert options.endpoint_url
        assert options.access_key
        assert options.secret_key
        self.client = _client(options.endpoint_url, options.access_key, options.secret_key)
        self.bucket, self.prefix = options.bucket, options.prefix

    async def read(self, key: str) -> bytes | None:
        try:
            answer = self.client.get_object(Bucket=self.bucket, Key=f"{self.prefix}/{key}")
        except self.client.exceptions.NoSuchKey:
            return None
        content: bytes = answer["Body"].read()
        return content

    async def write(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=f"{self.prefix}/{key}", Body=data)

    async def remove(self, key: str) -> None:
        self.client.delete_object(Bucket=self.bucket, Key=f"{self.prefix}/{key}")

    async def litter(self) -> None:
        # Consoles create such objects for directories, and careless path joins give such keys.
        for name in ("", "dir/", "a/", "a//b", "/x", "zero\u200bwidth", "k" * 950):
            await self.write(name, b"")
        self.client.put_object(Bucket=self.bucket, Key=f"{self.prefix}2/x", Body=b"a neighbour's")
        half = {"Bucket": self.bucket, "Key": f"{self.prefix}/x"}
        upload = self.client.create_multipart_upload(**half)
        self.client.upload_part(
            **half, UploadId=upload["UploadId"], PartNumber=1, Body=b"x" * (5 << 20)
        )
