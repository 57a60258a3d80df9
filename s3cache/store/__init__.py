"""Byte stores behind one small async protocol, and wrappers that nest over any of them.

Stores: :class:`MemoryStore`, :class:`FileStore`, :class:`S3Store`; :func:`open_store` makes one
from a URL. Wrappers, named by what they do, hold the store they wrap as ``inner``::

    BreakingStore(RetryingStore(MeteredStore(S3Store(...)), policy), breaker)

A wrapper of one's own is a :class:`WrapperStore` that overrides one method.
"""

from s3cache.store._base import (
    MAX_KEY_BYTES,
    AcceptSize,
    BreakingStore,
    Buffer,
    MemoryStore,
    MeteredStore,
    NotAccepted,
    ObjectInfo,
    PutMode,
    RetryingStore,
    RetryPolicy,
    Store,
    WrapperStore,
    check_key,
    is_key,
    os_errors,
)
from s3cache.store._file import (
    Directory,
    FileStore,
    ObjectFiles,
    is_writable_by_others,
    make_parents,
    mark_used,
)
from s3cache.store._s3 import S3Store, concurrently
from s3cache.store._s3_client import credentials_source
from s3cache.store._url import (
    STORE_OPTIONS,
    FileLocation,
    MemoryLocation,
    S3Options,
    StoreOptions,
    open_store,
    parse_url,
)

__all__ = [
    "MAX_KEY_BYTES",
    "STORE_OPTIONS",
    "AcceptSize",
    "BreakingStore",
    "Buffer",
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
    "concurrently",
    "credentials_source",
    "is_key",
    "is_writable_by_others",
    "make_parents",
    "mark_used",
    "open_store",
    "os_errors",
    "parse_url",
]
