"""Buckets of AWS S3, and of servers that speak its protocol.

The options are read without botocore; only the client imports it, when a store is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from s3cache.store.s3._options import SECRETS, S3Arguments, S3Options

if TYPE_CHECKING:
    from s3cache.store.s3._store import S3Store

__all__ = ["SECRETS", "S3Arguments", "S3Options", "S3Store"]

# Hidden from type checkers: to them a module with __getattr__ has every attribute there is.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name != "S3Store":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return import_module("s3cache.store.s3._store").S3Store
