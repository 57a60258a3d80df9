"""Fixtures for moto, an S3 server in this process."""

from __future__ import annotations

import uuid
from dataclasses import replace

import pytest

from s3cache.store import S3Options
from s3cache.testing import MotoServer
from tests.support.buckets import moto_place


@pytest.fixture(scope="session")
def moto_bucket(s3cache_moto_server: MotoServer) -> S3Options:
    return moto_place(s3cache_moto_server)


@pytest.fixture
def moto_options(moto_bucket: S3Options) -> S3Options:
    """Return options for an empty prefix."""
    return replace(moto_bucket, prefix=f"a/{uuid.uuid4().hex}")
