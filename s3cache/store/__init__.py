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
    MemoryStore,
    NotAccepted,
    ObjectInfo,
    PutMode,
    Store,
    WrapperStore,
    check_key,
    is_key,
    listing,
)
from s3cache.util import lazy_exports

if TYPE_CHECKING:
    from s3cache.store._deadline import DeadlineExecutor
    from s3cache.store._directory import (
        Directory,
        check_way,
        is_writable_by_others,
        make_parents,
        os_errors,
        private_directory,
    )
    from s3cache.store._file import FileStore, ObjectFiles, mark_used
    from s3cache.store._url import (
        STORE_OPTIONS,
        FileLocation,
        MemoryLocation,
        StoreOptions,
        open_store,
        parse_url,
        store_identity,
        store_note,
    )
    from s3cache.store._wrappers import (
        BreakerPolicy,
        BreakingStore,
        MeteredStore,
        RetryingStore,
        RetryPolicy,
    )
    from s3cache.store.s3 import S3Options, S3Store
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        _deadline="DeadlineExecutor",
        _directory="Directory check_way is_writable_by_others make_parents os_errors "
        "private_directory",
        _file="FileStore ObjectFiles mark_used",
        _url="STORE_OPTIONS FileLocation MemoryLocation StoreOptions open_store parse_url "
        "store_identity store_note",
        _wrappers="BreakerPolicy BreakingStore MeteredStore RetryPolicy RetryingStore",
        s3="S3Options S3Store",
    )

__all__ = [
    "MAX_KEY_BYTES",
    "STORE_OPTIONS",
    "AcceptSize",
    "BreakerPolicy",
    "BreakingStore",
    "Buffer",
    "DeadlineExecutor",
    "Directory",
    "FileLocation",
    "FileStore",
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
    "Store",
    "StoreOptions",
    "WrapperStore",
    "check_key",
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
