"""The store protocol: one small async interface for bytes under keys.

Every store (memory, local directory, S3) and every wrapper (retrying, limiting, ...) implements
:class:`Store`, promises the same things and passes the same contract suite
(``tests/contract/``). What can be built from these seven calls is not part of the protocol.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from s3cache.errors import ConfigError

__all__ = ["MAX_KEY_BYTES", "Buffer", "ObjectInfo", "PutMode", "Store", "check_key", "check_range"]

Buffer: TypeAlias = "bytes | bytearray | memoryview"
PutMode: TypeAlias = Literal["overwrite", "create"]

# S3 allows 1,024 bytes for prefix and key together:
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/object-keys.html
MAX_KEY_BYTES = 900


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a store knows of one object without reading it.

    Attributes:
        key: the object's key, as it was given to ``put``.
        size: bytes.
        modified: seconds since the epoch, by the store's clock.
    """

    key: str
    size: int
    modified: float


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

    async def get(self, key: str) -> Buffer | None:
        """The whole object, or ``None`` where there is none.

        What is returned is one version of the object as some ``put`` wrote it, never a mixture
        and never a part.
        """
        ...

    async def get_range(self, key: str, start: int, length: int) -> Buffer | None:
        """``length`` bytes from ``start``, fewer where the object ends; ``None`` if absent.

        ``start`` at or past the end gives ``b""``.
        """
        ...

    async def head(self, key: str) -> ObjectInfo | None:
        """The object's size and time, or ``None`` where there is none."""
        ...

    async def put(
        self,
        key: str,
        data: Buffer,
        *,
        mode: PutMode = "overwrite",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Write the whole object or fail: no reader ever sees a part of it.

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
        """All objects whose key starts with ``prefix`` (a string, not a path), in no set order.

        Objects written or deleted meanwhile may or may not be listed; all others are, once.
        """
        ...

    async def atomic_create(self) -> bool:
        """Whether ``put(mode="create")`` lets exactly one of several racing writers win."""
        ...

    async def aclose(self) -> None:
        """Release connections and files. Calling it twice does nothing."""
        ...


def check_key(key: str) -> str:
    """Return ``key`` if every store can hold it.

    Raises:
        ConfigError: ``key`` is empty, too long, no valid Unicode, or holds a control character
            or an empty, ``.`` or ``..`` segment. (S3 servers normalise or refuse the latter.)
    """
    problem = None
    try:
        size = len(key.encode("utf-8"))
    except UnicodeEncodeError:
        raise ConfigError(
            f"key {key!r}", "holds a lone surrogate", "use valid Unicode text"
        ) from None
    if size == 0:
        problem = "is empty"
    elif size > MAX_KEY_BYTES:
        problem = f"is {size} bytes long, more than {MAX_KEY_BYTES}"
    elif not key.isprintable():
        problem = "holds a control or unprintable character"
    elif any(segment in ("", ".", "..") for segment in key.split("/")):
        problem = "has an empty, '.' or '..' segment"
    if problem is not None:
        raise ConfigError(f"key {key!r}", problem, "use a relative path such as 'ab/cdef.0'")
    return key


def check_range(start: int, length: int) -> None:
    """Raises :class:`~s3cache.errors.ConfigError` for a negative start or length."""
    if start < 0 or length < 0:
        raise ConfigError(
            f"range start={start}, length={length}", "is negative", "give 0 or more for both"
        )
