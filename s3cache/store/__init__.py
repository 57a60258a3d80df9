"""Byte stores behind one small async protocol, and wrappers that nest over any of them.

Stores: :class:`MemoryStore`, :class:`LocalStore`, :class:`S3Store`; :func:`open_store` makes one
from a URL. Wrappers, named by what they do, hold the store they wrap as ``inner``::

    BreakingStore(RetryingStore(LimitingStore(MeteredStore(S3Store(...)), 32), policy), breaker)

The breaker belongs outside the retries: what reaches a store inside them is cut off by
cancellation, which says nothing about the server, and a server that hangs must open it too.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from s3cache.store._base import MAX_KEY_BYTES, Buffer, ObjectInfo, PutMode, Store, check_key

if TYPE_CHECKING:
    from s3cache.store._breaking import BreakerPolicy, BreakingStore
    from s3cache.store._faulty import FaultRates, FaultyStore
    from s3cache.store._latency import LatencyStore
    from s3cache.store._limiting import LimitingStore
    from s3cache.store._local import LocalStore
    from s3cache.store._memory import MemoryStore
    from s3cache.store._metered import MeteredStore, VerbStats
    from s3cache.store._readonly import ReadOnlyStore
    from s3cache.store._retrying import RetryingStore, RetryPolicy
    from s3cache.store._s3 import S3Store
    from s3cache.store._url import open_store
    from s3cache.store._wrapper import WrapperStore

__all__ = [
    "MAX_KEY_BYTES",
    "BreakerPolicy",
    "BreakingStore",
    "Buffer",
    "FaultRates",
    "FaultyStore",
    "LatencyStore",
    "LimitingStore",
    "LocalStore",
    "MemoryStore",
    "MeteredStore",
    "ObjectInfo",
    "PutMode",
    "ReadOnlyStore",
    "RetryPolicy",
    "RetryingStore",
    "S3Store",
    "Store",
    "VerbStats",
    "WrapperStore",
    "check_key",
    "open_store",
]

# Loaded on first use: aioboto3 alone costs half a second, and `import s3cache` must cost nothing.
_LAZY = {
    "BreakerPolicy": "_breaking",
    "BreakingStore": "_breaking",
    "FaultRates": "_faulty",
    "FaultyStore": "_faulty",
    "LatencyStore": "_latency",
    "LimitingStore": "_limiting",
    "LocalStore": "_local",
    "MemoryStore": "_memory",
    "MeteredStore": "_metered",
    "ReadOnlyStore": "_readonly",
    "RetryPolicy": "_retrying",
    "RetryingStore": "_retrying",
    "S3Store": "_s3",
    "VerbStats": "_metered",
    "WrapperStore": "_wrapper",
    "open_store": "_url",
}

# Hidden from type checkers: to them a module with __getattr__ has every attribute there is.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
