"""The store protocol: one small async interface for bytes under keys; and the store in memory.

Every store (memory, directory, S3) and every wrapper (retrying, metering, ...) implements
:class:`Store`, promises the same things and passes the same contract suite.
"""

from __future__ import annotations

import copy
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, overload, runtime_checkable

from s3cache.errors import ConfigError, PreconditionError
from s3cache.stats import Verb

__all__ = [
    "MAX_KEY_BYTES",
    "PAGE_OBJECTS",
    "AcceptSize",
    "Buffer",
    "MemoryStore",
    "NotAccepted",
    "ObjectInfo",
    "PutMode",
    "Store",
    "WrapperStore",
    "check_key",
    "check_range",
    "close_listing",
    "is_key",
    "listing",
]

Buffer: TypeAlias = "bytes | bytearray | memoryview"
PutMode: TypeAlias = Literal["overwrite", "create"]
#: Says for the size of an object, in bytes, whether its body is to be read.
AcceptSize: TypeAlias = Callable[[int], bool]

_T = TypeVar("_T")

# S3 allows 1,024 bytes for prefix and key together:
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/object-keys.html
MAX_KEY_BYTES = 900
# What S3 returns for one ListObjectsV2 request.
PAGE_OBJECTS = 1_000


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a store knows about one object without reading it.

    Attributes:
        key: the object's key, as it was given to ``put``.
        size: bytes.
        modified: seconds since the epoch, by the store's clock.
    """

    key: str
    size: int
    modified: float


@dataclass(frozen=True, slots=True)
class NotAccepted:
    """The answer of ``get`` where the object is there, but its ``size`` in bytes was refused."""

    size: int


@runtime_checkable
class Store(Protocol):
    """Bytes under keys, asynchronously.

    Keys are strings of 1 to :data:`MAX_KEY_BYTES` UTF-8 bytes; see :func:`check_key`. A store is
    used from one event loop, by any number of tasks at once.

    Every method raises :class:`~s3cache.errors.TransientError` or
    :class:`~s3cache.errors.PermanentError` (or a subclass) where the store cannot answer, and
    :class:`~s3cache.errors.ConfigError` for an illegal key.
    """

    @property
    def url(self) -> str:
        """Where this store is, for messages: no credentials in it."""
        ...

    # An implementation needs no overloads if it is annotated to return Any.
    @overload
    async def get(self, key: str) -> Buffer | None: ...
    @overload
    async def get(
        self, key: str, accept_size: AcceptSize | None
    ) -> Buffer | NotAccepted | None: ...
    async def get(
        self, key: str, accept_size: AcceptSize | None = None
    ) -> Buffer | NotAccepted | None:
        """Return the whole object, or None if there is none.

        It is one version of the object as some ``put`` wrote it, never a mixture or a fragment.

        ``accept_size`` is called with the object's size, on the event loop, before the memory for
        the body is taken; where it returns False, the answer is :class:`NotAccepted`. It is not
        called for an absent object, and is called again where the object is read again: because a
        try failed, or because another version took its place.
        """
        ...

    async def get_range(self, key: str, start: int, length: int) -> Buffer | None:
        """Return ``length`` bytes from ``start``, fewer where the object ends; None if absent.

        ``start`` at or past the end gives ``b""``.
        """
        ...

    async def head(self, key: str) -> ObjectInfo | None:
        """Return the object's size and time, or None if there is none."""
        ...

    async def put(
        self,
        key: str,
        data: Buffer,
        *,
        mode: PutMode = "overwrite",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Write the whole object or fail: no reader ever sees a fragment of it.

        With ``mode="create"`` an object already there is left alone and
        :class:`~s3cache.errors.PreconditionError` is raised. Where the store is
        :attr:`atomic_create`, exactly one of several concurrent creators succeeds.
        A failed ``put`` may have been committed all the same (the answer got lost).

        ``metadata`` (ASCII names and values, 2 KiB in all) describes the object to a person who
        looks at the bucket. Stores that have no place for it drop it; nothing reads it back.
        """
        ...

    async def delete(self, key: str) -> None:
        """Remove the object; no error where there is none."""
        ...

    def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        """Yield all objects with keys below ``prefix`` (a string, not a path), in any order.

        Objects written or deleted meanwhile may or may not be listed; all others are, once.
        Files or objects with names that are no keys are not.
        """
        ...

    async def atomic_create(self) -> bool:
        """Return whether ``put(mode="create")`` lets exactly one of several racing writers win."""
        return True

    async def connect(self) -> None:
        """Connect before the first call needs it; does nothing where there is nothing to open."""
        return

    def written_as(self, note: bytes) -> Store:
        """Return this store with objects written as another process's ``note`` says.

        Raises:
            ConfigError: the note cannot be followed here.
        """
        return self

    async def aclose(self) -> None:
        """Release connections and files. Calling it twice does nothing."""
        return


class WrapperStore(Store):
    """Passes every call on to ``inner``; closing the wrapper closes ``inner``.

    A wrapper overrides :meth:`_around` for what it does with calls of any kind, and a verb's own
    method for what it does with that verb only.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    async def _around(self, verb: Verb, key: str, call: Callable[[], Awaitable[_T]]) -> _T:
        """Make one call to ``inner`` by awaiting ``call()``, as often as that takes.

        ``key`` is a listing's prefix for each page of it, ``""`` for the store as a whole.
        """
        return await call()

    @property
    def url(self) -> str:
        return self.inner.url

    async def get(self, key: str, accept_size: AcceptSize | None = None) -> Any:
        return await self._around("get", key, lambda: self.inner.get(key, accept_size))

    async def get_range(self, key: str, start: int, length: int) -> Buffer | None:
        return await self._around(
            "get_range", key, lambda: self.inner.get_range(key, start, length)
        )

    async def head(self, key: str) -> ObjectInfo | None:
        return await self._around("head", key, lambda: self.inner.head(key))

    async def put(self, key: str, data: Buffer, **options: Any) -> None:
        await self._around("put", key, lambda: self.inner.put(key, data, **options))

    async def delete(self, key: str) -> None:
        await self._around("delete", key, lambda: self.inner.delete(key))

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        async with listing(self.inner, prefix) as items:
            is_last = False
            while not is_last:
                page = await self._around("list", prefix, lambda: _page(items))
                is_last = len(page) < PAGE_OBJECTS
                for info in page:
                    yield info

    async def atomic_create(self) -> bool:
        return await self._around("atomic_create", "", self.inner.atomic_create)

    async def connect(self) -> None:
        await self.inner.connect()

    def written_as(self, note: bytes) -> Store:
        """Return a wrapper of the same kind, with the same state, over ``inner.written_as``."""
        other = copy.copy(self)
        other.inner = self.inner.written_as(note)
        return other

    async def aclose(self) -> None:
        await self.inner.aclose()


@asynccontextmanager
async def listing(store: Store, prefix: str) -> AsyncGenerator[AsyncIterator[ObjectInfo], None]:
    """Give the block ``store.list(prefix)``, and close it afterwards.

    Most stores give a generator, which holds a connection or a directory open until it is closed.
    """
    items = store.list(prefix)
    try:
        yield items
    finally:
        await close_listing(items)


async def close_listing(items: AsyncIterator[ObjectInfo]) -> None:
    """Close a listing that may not have been read to its end."""
    aclose = getattr(items, "aclose", None)  # which the protocol does not promise
    if aclose is not None:
        await aclose()


async def _page(items: AsyncIterator[ObjectInfo]) -> list[ObjectInfo]:
    page: list[ObjectInfo] = []
    while len(page) < PAGE_OBJECTS and (info := await anext(items, None)) is not None:
        page.append(info)
    return page


class MemoryStore(Store):
    """A :class:`Store` in this process's memory, for tests and trials.

    Objects are copied in and immutable from then on. No call gives up the event loop half-way, so
    ``put`` is atomic. A closed store keeps its objects.
    """

    def __init__(self, name: str = "") -> None:
        self._url = f"memory://{name}"
        self._objects: dict[str, tuple[bytes, float]] = {}

    def __repr__(self) -> str:
        return f"MemoryStore({self._url!r})"

    @property
    def url(self) -> str:
        return self._url

    async def get(self, key: str, accept_size: AcceptSize | None = None) -> Any:
        data, _ = self._objects.get(check_key(key), (None, 0.0))
        if data is None or accept_size is None or accept_size(len(data)):
            return data
        return NotAccepted(len(data))

    async def get_range(self, key: str, start: int, length: int) -> Buffer | None:
        check_range(start, length)
        data, _ = self._objects.get(check_key(key), (None, 0.0))
        return None if data is None else data[start : start + length]

    async def head(self, key: str) -> ObjectInfo | None:
        data, modified = self._objects.get(check_key(key), (None, 0.0))
        return None if data is None else ObjectInfo(key, len(data), modified)

    async def put(
        self,
        key: str,
        data: Buffer,
        *,
        mode: PutMode = "overwrite",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        if check_key(key) in self._objects and mode == "create":
            raise PreconditionError("exists already", op="put", store=self._url, key=key)
        self._objects[key] = (bytes(data), time.time())

    async def delete(self, key: str) -> None:
        self._objects.pop(check_key(key), None)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        for key, (data, modified) in tuple(self._objects.items()):
            if key.startswith(prefix):
                yield ObjectInfo(key, len(data), modified)


def check_key(key: str) -> str:
    """Return ``key`` if every store can hold it.

    Raises:
        ConfigError: ``key`` is empty, too long, no valid Unicode, or holds a control character
            or an empty, ``.`` or ``..`` segment. (S3 servers normalise or refuse the latter.)
    """
    problem = _problem(key)
    if problem is not None:
        raise ConfigError(f"key {key!r}", problem, "use a relative path such as 'ab/cdef.0'")
    return key


def is_key(key: str) -> bool:
    """Return whether ``key`` can name an object: :func:`check_key` as a question."""
    return _problem(key) is None


def _problem(key: str) -> str | None:
    try:
        size = len(key.encode("utf-8"))
    except UnicodeEncodeError:
        return "holds a lone surrogate"
    if size == 0:
        return "is empty"
    if size > MAX_KEY_BYTES:
        return f"is {size} bytes long, more than {MAX_KEY_BYTES}"
    if not key.isprintable():
        return "holds a control or unprintable character"
    if any(segment in ("", ".", "..") for segment in key.split("/")):
        return "has an empty, '.' or '..' segment"
    return None


def check_range(start: int, length: int) -> None:
    """Raise :class:`~s3cache.errors.ConfigError` for a negative start or length."""
    if start < 0 or length < 0:
        raise ConfigError(
            f"range start={start}, length={length}", "is negative", "give 0 or more for both"
        )
