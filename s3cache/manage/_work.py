"""Open a remote or a local tier, and verify, copy and remove many of its entries at once."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Container
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from s3cache import entries
from s3cache.entries import Replaceable, publish
from s3cache.errors import (
    AccessDeniedError,
    ConfigError,
    CorruptError,
    S3CacheError,
    StoreError,
    TransientError,
    UntrustedError,
)
from s3cache.frame import Frame, Head, TrustCheck
from s3cache.manage._scan import concurrently, read_about, read_head
from s3cache.manage._selection import Item
from s3cache.settings import Options, Settings
from s3cache.store import (
    FileLocation,
    MeteredStore,
    RetryingStore,
    RetryPolicy,
    Store,
    open_store,
    parse_url,
    store_identity,
)
from s3cache.tier import Budget, DiskTier, TierStore, background
from s3cache.trust import Policy

if TYPE_CHECKING:
    from typing_extensions import Unpack

_CLOSE_S = 5.0


@dataclass(frozen=True)
class Place:
    """A store of entries, which is closed when it is left as a context manager.

    Attributes:
        store: with retries; nothing is sent before it is used.
        is_local: whether it is this machine's tier.
        policy: decides which signers' entries are used.
    """

    store: Store
    is_local: bool
    policy: Policy

    async def to_upload(self) -> set[str]:
        """Return the names in a local tier that are still to be uploaded; none for a remote."""
        return await self.store.recorded() if isinstance(self.store, TierStore) else set()

    def close(self) -> None:
        """Close the store, waiting a few seconds at most."""
        with contextlib.suppress(S3CacheError, concurrent.futures.TimeoutError):
            background().wait(self.store.aclose(), _CLOSE_S)

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def trust_of(settings: Settings) -> Policy:
    """Return the trust policy of the settings and of the machine's own file.

    Raises:
        ConfigError: a key or a name cannot be used.
    """
    return settings.trust_policy()


def url_of(settings: Settings) -> str:
    """Return the remote's URL.

    Raises:
        ConfigError: there is none.
    """
    if settings.url is None:
        raise ConfigError("the cache", "has no URL", "give --url, or set S3CACHE_URL")
    return settings.url


def open_place(
    url: str | None = None,
    *,
    in_tier: bool = False,
    of_all: bool = False,
    to_fill: bool = False,
    **options: Unpack[Options],
) -> Place:
    """Open the remote that ``url`` and the environment name, or this machine's tier of it.

    Args:
        in_tier: the tier, not the remote.
        of_all: what the tier holds of all remotes.
        to_fill: make a missing directory, as a job would; else a missing one is an error.

    Raises:
        ConfigError: the settings cannot be used, or name no remote.
        StoreError: the local tier cannot be used.
    """
    settings, of_store = Settings.load(url, **options)
    policy = trust_of(settings)
    if in_tier:
        identity = "" if settings.url is None else store_identity(settings.url, **of_store)
        namespace = "" if of_all else hashlib.sha256(identity.encode()).hexdigest()[:16]
        tier = DiskTier(
            settings.local_dir,
            namespace=namespace,
            max_bytes=settings.local_max_bytes,
            max_files=settings.local_max_files,
        )
        return Place(TierStore(tier), True, policy)
    remote = url_of(settings)
    retries = RetryPolicy(
        attempts=settings.retry_attempts,
        total_timeout_s=settings.retry_timeout_s,
        attempt_timeout_s=settings.attempt_timeout_s,
        base_delay_s=0.1,
        max_delay_s=10.0,
    )
    if not to_fill and isinstance(parse_url(remote, **of_store), FileLocation):
        of_store["create"] = False
    store = MeteredStore(open_store(remote, **of_store))
    return Place(RetryingStore(store, retries), False, policy)


# -- work on many entries, in bounded memory


# Bytes of objects that are in memory at once. A larger object is read alone.
_MAX_BYTES = 256 << 20
_NO_BOUND = 1 << 62
_FAILURES_SHOWN = 100


@dataclass
class BatchResult:
    """Counts of what became of many entries.

    Attributes:
        done: entries that were verified, copied or removed; ``size`` their bytes.
        present: entries that needed nothing, as they were there already.
        gone: entries that were removed by others in the meantime.
        kept: entries that were left alone: not uploaded yet, or sound after all.
        failed: how many could not be, with the first hundred and why.
    """

    done: int = 0
    size: int = 0
    present: int = 0
    gone: int = 0
    kept: int = 0
    failed: int = 0
    failures: list[tuple[str, str]] = field(default_factory=list)

    def fail(self, name: str, why: Exception | str) -> None:
        """Count a failure."""
        self.failed += 1
        if len(self.failures) < _FAILURES_SHOWN:
            self.failures.append((name, str(why)))


_Advance = Callable[[int], object]
_Batches = AsyncIterator[list[Item]]


async def verify(
    store: Store,
    batches: _Batches,
    *,
    admit: TrustCheck | None = None,
    advance: _Advance | None = None,
) -> BatchResult:
    """Read each entry whole, and check every digest, its place, and its signatures.

    Raises:
        StoreError: the store cannot answer.
    """

    async def one(item: Item) -> str:
        return "gone" if await _verified(store, item, admit) is None else "done"

    return await _each(batches, one, advance)


async def remove(
    store: Store,
    batches: _Batches,
    *,
    keep: Container[str] = (),
    admit: TrustCheck | None = None,
    advance: _Advance | None = None,
) -> BatchResult:
    """Remove each entry, except those with a name in ``keep``.

    An entry that was chosen because it could not be used is read again: it may have been the
    network.

    Args:
        admit: as the entries were chosen with.

    Raises:
        StoreError: the store refuses, or cannot answer; what was removed by then stays removed.
    """

    async def one(item: Item) -> str:
        if item.name in keep:
            return "kept"
        if item.problem is not None:
            again = await read_about(store, item, admit)
            if again is None or again.problem is None:
                return "gone" if again is None else "kept"
        await store.delete(item.name)
        return "done"

    return await _each(batches, one, advance, _NO_BOUND)


async def copy(
    source: Store,
    target: Store,
    batches: _Batches,
    *,
    admit: TrustCheck | None = None,
    advance: _Advance | None = None,
) -> BatchResult:
    """Copy each entry into ``target``, verified on its way; done again it copies what is left.

    An entry of the target is compared with the source's by digest, and read whole unless the source
    is a local tier: a damaged one, or one that is not admitted, is replaced. Another entry of the
    same variant stays in a remote that a local tier is copied to, and where a trusted key has
    signed it; else it may be forged, and is replaced. In a local tier an entry keeps its name; in a
    remote it is published as if it were saved there.

    Raises:
        StoreError: a store refuses for good. Transient errors of a server are counted.
    """
    is_mirror = not isinstance(target, TierStore) and not isinstance(source, TierStore)

    async def one(item: Item) -> str | Exception:
        try:
            head = await read_head(source, item.name, admit)
            if head is not None and await _has(target, item.place, head, admit, source):
                return "present"
            entry = await _verified(source, item, admit)
            if entry is None:
                return "gone"
            if isinstance(target, TierStore):
                await target.put(item.place, entry.data)
                return "done"
            replaceable = Replaceable(everything=is_mirror)
            is_new = await publish(target, entry, replaceable=replaceable, admit=admit)
            return "done" if is_new else "present"
        except TransientError as exc:
            return exc
        except AccessDeniedError as exc:
            if await target.head(item.place) is None:
                raise
            return exc  # the right to add may not include that to overwrite

    return await _each(batches, one, advance)


async def _has(
    target: Store, name: str, head: Head, admit: TrustCheck | None, source: Store
) -> bool:
    """Return whether the target has the entry with that head, or one in its place that stays."""
    for each in [name] if isinstance(target, TierStore) else entries.names_of(head.header):
        with contextlib.suppress(CorruptError, UntrustedError):
            there = await read_head(target, each, admit)
            if there is None or there.header.variant != head.header.variant:
                continue
            is_signed = admit is not None and admit(there.digest, there.signatures) is not None
            # An entry has one digest, signed or not: the signed one replaces the other.
            is_same = there.digest == head.digest and bool(there.signatures) == bool(
                head.signatures
            )
            if not (is_same or is_signed):
                continue
            if isinstance(source, TierStore):  # readers replace what is damaged behind its head
                info = await target.head(each)
                if info is not None and info.size == there.size:
                    return True
                continue
            data = await target.get(each)
            if data is not None:
                await asyncio.to_thread(entries.verify, each, data, admit=admit)
                return True
    return False


async def _verified(store: Store, item: Item, admit: TrustCheck | None) -> Frame | None:
    data = await store.get(item.name)
    if data is None:
        return None
    return await asyncio.to_thread(entries.verify, item.place, data, admit=admit)


async def _each(
    batches: _Batches,
    work: Callable[[Item], Awaitable[str | Exception]],
    advance: _Advance | None,
    max_bytes: int = _MAX_BYTES,
) -> BatchResult:
    """Work on several items at once, and count the results.

    The first StoreError is raised when the others of its batch have ended.

    Args:
        work: returns the name of the count, or why it failed.
        max_bytes: of items that are worked on at once.
    """
    result, budget = BatchResult(), Budget(max_bytes)

    async def one(item: Item) -> StoreError | None:
        await budget.take(item.size)
        try:
            ended = await work(item)
        except (CorruptError, UntrustedError) as exc:
            ended = exc
        except StoreError as exc:
            return exc
        finally:
            budget.give(item.size)
        if isinstance(ended, str):
            setattr(result, ended, getattr(result, ended) + 1)
            result.size += item.size if ended == "done" else 0
        else:
            result.fail(item.name, ended)
        if advance is not None:
            advance(1)
        return None

    async for batch in batches:
        for error in await concurrently(one, batch):
            if error is not None:
                raise error
    return result
