"""Fixtures for a real Ceph RADOS Gateway that the environment names."""

from __future__ import annotations

import asyncio
import os
import uuid

import pytest

from s3cache.store import S3Options
from tests.support.buckets import make_bucket

NAMES = ("ENDPOINT", "ACCESS_KEY", "SECRET_KEY")


@pytest.fixture(scope="session")
def rgw_bucket() -> S3Options:
    """Create a bucket for this run."""
    found = {name: os.environ.get(f"S3CACHE_TEST_RGW_{name}") for name in NAMES}
    if missing := [f"S3CACHE_TEST_RGW_{name}" for name, value in found.items() if not value]:
        pytest.skip(f"no Ceph RGW to test with: {', '.join(missing)} not set (see make test-rgw)")
    options = S3Options(
        f"s3cache-test-{uuid.uuid4().hex[:12]}",
        endpoint_url=found["ENDPOINT"],
        region="us-east-1",
        access_key=found["ACCESS_KEY"],
        secret_key=found["SECRET_KEY"],
    )
    asyncio.run(make_bucket(options))
    return options


@pytest.fixture
def url(rgw_bucket: S3Options) -> str:
    """Return the URL of an empty prefix."""
    return f"s3://{rgw_bucket.bucket}/a/{uuid.uuid4().hex}"


@pytest.fixture
def served_options(rgw_bucket: S3Options) -> dict[str, str]:
    names = ("endpoint_url", "region", "access_key", "secret_key")
    return {name: getattr(rgw_bucket, name) for name in names}
