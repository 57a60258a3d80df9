"""Buckets of AWS S3, and of servers that speak its protocol.

The options are read without botocore; only the client imports it, when a store is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from s3cache.store.s3._options import SECRETS, S3Arguments, S3Options
from s3cache.util import lazy_exports

if TYPE_CHECKING:
    from s3cache.store.s3._client import credentials_source
    from s3cache.store.s3._store import S3Store
else:
    __getattr__, __dir__ = lazy_exports(__name__, _client="credentials_source", _store="S3Store")

__all__ = ["SECRETS", "S3Arguments", "S3Options", "S3Store", "credentials_source"]
