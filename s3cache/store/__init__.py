"""Byte stores behind one small async protocol, and wrappers that nest over any of them.

Stores: :class:`MemoryStore`, :class:`FileStore`, :class:`S3Store`; :func:`open_store` makes one
from a URL. Wrappers are named by their effect; their ``inner`` is the wrapped store::

    BreakingStore(RetryingStore(MeteredStore(S3Store(...)), policy), breaker)

To write a wrapper, subclass :class:`WrapperStore` and override one method.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from s3cache.store._base import LONGEST_NAME_BYTES as LONGEST_NAME_BYTES
from s3cache.store._base import MAX_KEY_BYTES as MAX_KEY_BYTES
from s3cache.store._base import AcceptSize as AcceptSize
from s3cache.store._base import BreakingStore as BreakingStore
from s3cache.store._base import Buffer as Buffer
from s3cache.store._base import MemoryStore as MemoryStore
from s3cache.store._base import MeteredStore as MeteredStore
from s3cache.store._base import NotAccepted as NotAccepted
from s3cache.store._base import ObjectInfo as ObjectInfo
from s3cache.store._base import PutMode as PutMode
from s3cache.store._base import RetryingStore as RetryingStore
from s3cache.store._base import RetryPolicy as RetryPolicy
from s3cache.store._base import Store as Store
from s3cache.store._base import WrapperStore as WrapperStore
from s3cache.store._base import check_key as check_key
from s3cache.store._base import os_errors as os_errors
from s3cache.store._file import Directory as Directory
from s3cache.store._file import FileStore as FileStore
from s3cache.store._file import ObjectFiles as ObjectFiles
from s3cache.store._file import check_files as check_files
from s3cache.store._file import is_writable_by_others as is_writable_by_others
from s3cache.store._file import mark_used as mark_used
from s3cache.store._file import own_directory as own_directory
from s3cache.store._file import private_directory as private_directory
from s3cache.store._options import STORE_OPTIONS as STORE_OPTIONS
from s3cache.store._options import FileLocation as FileLocation
from s3cache.store._options import MemoryLocation as MemoryLocation
from s3cache.store._options import S3Options as S3Options
from s3cache.store._options import StoreOptions as StoreOptions
from s3cache.store._options import parse_url as parse_url
from s3cache.store._s3 import S3Store as S3Store
from s3cache.store._s3 import concurrently as concurrently
from s3cache.store._s3_client import credentials_source as credentials_source

if TYPE_CHECKING:
    from typing_extensions import Unpack

_memory_stores: dict[str, Store] = {}


def open_store(url: str, **options: Unpack[StoreOptions]) -> Store:
    """Return the store at ``url``, without opening it or importing botocore.

    Equal ``memory://`` URLs are the same store.

    Raises:
        ConfigError: the URL or an option cannot be used; see :func:`parse_url`.
    """
    location = parse_url(url, **options)
    if isinstance(location, S3Options):
        return S3Store(location)
    if isinstance(location, FileLocation):
        return FileStore(location.path, create=location.create)
    return _memory_stores.setdefault(location.name, MemoryStore(location.name))
