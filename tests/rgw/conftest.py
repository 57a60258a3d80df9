"""Fixtures for a real Ceph RADOS Gateway that the environment names."""

from __future__ import annotations

import uuid

import pytest

from s3cache.store import S3Options
from tests.support.buckets import rgw_place


@pytest.fixture(scope="session")
def rgw_bucket() -> S3Options:
    """Create a bucket for this run."""
    options = rgw_place("s3cache-test")
    if options is None:
        pytest.skip("no Ceph RGW to test with: S3CACHE_TEST_RGW_ENDPOINT is not set")
    return options


@pytest.fixture
def url(rgw_bucket: S3Options) -> str:
    """Return the URL of an empty prefix."""
    return f"s3://{rgw_bucket.bucket}/a/{uuid.uuid4().hex}"


@pytest.fixture
def served_options(rgw_bucket: S3Options) -> dict[str, str]:
    names = ("endpoint_url", "region", "access_key", "secret_key")
    return {name: getattr(rgw_bucket, name) for name in names}
