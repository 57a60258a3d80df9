"""Byte stores behind one small async protocol, and wrappers that nest over any of them.

Stores: :class:`MemoryStore`, :class:`FileStore`, :class:`S3Store`; :func:`open_store` makes one
from a URL. Wrappers, named by what they do, hold the store they wrap as ``inner``::

    BreakingStore(RetryingStore(MeteredStore(S3Store(...)), policy), breaker)

A wrapper of one's own is a :class:`WrapperStore` that overrides one method.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from s3cache.store._base import (
    MAX_KEY_BYTES,
    AcceptSize,
    Buffer,
    NotAccepted,
    ObjectInfo,
    PutMode,
    Store,
    WrapperStore,
    check_key,
    check_range,
    is_key,
    listing,
    os_errors,
)
from s3cache.util import lazy_exports

if TYPE_CHECKING:
    from s3cache.store._deadline import DeadlineExecutor
    from s3cache.store._directory import (
        Directory,
        check_way,
        is_writable_by_others,
        make_parents,
        private_directory,
    )
    from s3cache.store._local import FileStore, MemoryStore
    from s3cache.store._objects import ObjectFiles, Staged, mark_used
    from s3cache.store._resilience import (
        BreakerPolicy,
        BreakerState,
        BreakingStore,
        LatencyStore,
        MeteredStore,
        RetryingStore,
        RetryPolicy,
    )
    from s3cache.store._url import (
        STORE_OPTIONS,
        FileLocation,
        Location,
        MemoryLocation,
        StoreOptions,
        open_store,
        parse_url,
        store_identity,
        store_note,
    )
    from s3cache.store.s3 import S3Options, S3Store
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        _deadline="DeadlineExecutor",
        _directory="Directory check_way is_writable_by_others make_parents private_directory",
        _local="FileStore MemoryStore",
        _objects="ObjectFiles Staged mark_used",
        _resilience="BreakerPolicy BreakerState BreakingStore LatencyStore MeteredStore "
        "RetryPolicy RetryingStore",
        _url="STORE_OPTIONS FileLocation Location MemoryLocation StoreOptions open_store "
        "parse_url store_identity store_note",
        s3="S3Options S3Store",
    )

__all__ = [
    "MAX_KEY_BYTES",
    "STORE_OPTIONS",
    "AcceptSize",
    "BreakerPolicy",
    "BreakerState",
    "BreakingStore",
    "Buffer",
    "DeadlineExecutor",
    "Directory",
    "FileLocation",
    "FileStore",
    "LatencyStore",
    "Location",
    "MemoryLocation",
    "MemoryStore",
    "MeteredStore",
    "NotAccepted",
    "ObjectFiles",
    "ObjectInfo",
    "PutMode",
    "RetryPolicy",
    "RetryingStore",
    "S3Options",
    "S3Store",
    "Staged",
    "Store",
    "StoreOptions",
    "WrapperStore",
    "check_key",
    "check_range",
    "check_way",
    "is_key",
    "is_writable_by_others",
    "listing",
    "make_parents",
    "mark_used",
    "open_store",
    "os_errors",
    "parse_url",
    "private_directory",
    "store_identity",
    "store_note",
]
