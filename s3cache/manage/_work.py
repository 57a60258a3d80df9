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
from s3cache.frame import Frame, Head, Judge
from s3cache.manage._items import Item, read_about, read_head
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
from s3cache.tier import DiskTier, TierStore
from s3cache.transfer import Budget, background
from s3cache.trust import Policy, check_name, policy_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Place", "Tally", "copy", "open_place", "remove", "trust_of", "verify"]

_CLOSE_S = 5.0


@dataclass(frozen=True)
class Place:
    """Where entries lie; as a context manager it closes its store in the end.

    Attributes:
        store: with retries; nothing is sent before it is used.
        is_local: whether it is this machine's tier.
        settings: those that led here.
        policy: decides which signers' entries are used.
    """

    store: Store
    is_local: bool
    settings: Settings
    policy: Policy

    async def to_upload(self) -> set[str]:
        """Return the names in a local tier that are still to be uploaded; none for a remote."""
        return await self.store.recorded() if isinstance(self.store, TierStore) else set()

    def close(self) -> None:
        """Close the store, which takes no longer than a few seconds."""
        with contextlib.suppress(concurrent.futures.TimeoutError):
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
    return policy_of(
        None if settings.trust == "auto" else settings.trust,
        settings.trusted_keys or "",
        settings.revoked or "",
        audience=check_name("option audience", settings.audience),
    )


def open_place(
    url: str | None = None,
    *,
    in_tier: bool = False,
    of_all: bool = False,
    to_fill: bool = False,
    **options: Unpack[Options],
) -> Place:
    """The remote that ``url`` and the environment name, or this machine's tier of it.

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
        return Place(TierStore(tier), True, settings, policy)
    if settings.url is None:
        raise ConfigError("the cache", "has no URL", "give --url, or set S3CACHE_URL")
    retries = RetryPolicy(
        attempts=settings.retry_attempts,
        total_timeout_s=settings.retry_timeout_s,
        attempt_timeout_s=settings.attempt_timeout_s,
        base_delay_s=0.1,
        max_delay_s=10.0,
    )
    if not to_fill and isinstance(parse_url(settings.url, **of_store), FileLocation):
        of_store["create"] = False
    store = MeteredStore(open_store(settings.url, **of_store))
    return Place(RetryingStore(store, retries), False, settings, policy)


# -- work on many entries, in bounded memory


_CONCURRENCY = 16
# Of objects that are in memory at once. One that is larger is alone.
_MAX_BYTES = 256 << 20
_FAILURES_SHOWN = 100


@dataclass
class Tally:
    """What came of it.

    Attributes:
        done: entries that were verified, copied or removed; ``size`` their bytes.
        present: entries that needed nothing, as they were there already.
        gone: entries that somebody removed meanwhile.
        kept: entries that were left alone: nobody else has them yet, or they are sound after all.
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
        self.failed += 1
        if len(self.failures) < _FAILURES_SHOWN:
            self.failures.append((name, str(why)))


_Advance = Callable[[int], object]


async def verify(
    store: Store,
    batches: AsyncIterator[list[Item]],
    *,
    admit: Judge | None = None,
    advance: _Advance = bool,
) -> Tally:
    """Read each entry whole, and check every digest, its place, and who has signed it.

    Raises:
        StoreError: the store cannot answer.
    """
    tally, budget = Tally(), Budget(_MAX_BYTES)

    async def one(item: Item) -> None:
        await budget.take(item.size)
        try:
            if await _verified(store, item, admit) is None:
                tally.gone += 1
                return
            tally.done += 1
            tally.size += item.size
        except (CorruptError, UntrustedError) as exc:
            tally.fail(item.name, exc)
        finally:
            budget.give(item.size)

    await _each(batches, one, advance)
    return tally


async def remove(
    store: Store,
    batches: AsyncIterator[list[Item]],
    *,
    keep: Container[str] = (),
    admit: Judge | None = None,
    advance: _Advance = bool,
) -> Tally:
    """Remove each entry, but those whose names are to be kept.

    What was chosen because it could not be used is read again: it may have been the network.

    Args:
        admit: as the entries were chosen with.

    Raises:
        StoreError: the store refuses, or cannot answer; what was removed by then stays so.
    """
    tally = Tally()

    async def one(item: Item) -> None:
        if item.name in keep:
            tally.kept += 1
            return
        if item.problem is not None:
            again = await read_about(store, item, admit)
            if again is None or again.problem is None:
                tally.kept += again is not None
                tally.gone += again is None
                return
        await store.delete(item.name)
        tally.done += 1
        tally.size += item.size

    await _each(batches, one, advance)
    return tally


async def copy(
    source: Store,
    target: Store,
    batches: AsyncIterator[list[Item]],
    *,
    admit: Judge | None = None,
    advance: _Advance = bool,
) -> Tally:
    """Have each entry in ``target`` too, verified on its way; done again it does what is left.

    What the target has is held against the source by digest, and read whole but where the source
    is a local tier: what is damaged, or not admitted, is replaced. Another entry of the same
    variant stays in a remote that a local tier is copied to, and where a trusted key has signed it;
    else nothing tells it from a forged one, and it is replaced. In a local tier an entry keeps its
    name; in a remote one it is published as if it were saved there.

    Raises:
        StoreError: a store refuses for good. What a server merely fails to do is counted.
    """
    tally, budget = Tally(), Budget(_MAX_BYTES)
    is_mirror = not isinstance(target, TierStore) and not isinstance(source, TierStore)

    async def one(item: Item) -> None:
        await budget.take(item.size)
        try:
            head = await read_head(source, item.name, admit)
            if head is not None and await _has(target, item.place, head, admit, source):
                tally.present += 1
                return
            entry = await _verified(source, item, admit)
            if entry is None:
                tally.gone += 1
                return
            if await _put(target, item.place, entry, admit, Replaceable(everything=is_mirror)):
                tally.done += 1
                tally.size += item.size
            else:
                tally.present += 1
        except (CorruptError, UntrustedError, TransientError) as exc:
            tally.fail(item.name, exc)
        except AccessDeniedError as exc:
            if await target.head(item.place) is None:
                raise
            tally.fail(item.name, exc)  # who may add may not always overwrite
        finally:
            budget.give(item.size)

    await _each(batches, one, advance)
    return tally


async def _has(target: Store, name: str, head: Head, admit: Judge | None, source: Store) -> bool:
    """Whether the target has the entry with that head, or one in its place that stays."""
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
            if isinstance(source, TierStore):  # a job's: readers see to what is damaged behind it
                info = await target.head(each)
                if info is not None and info.size == there.size:
                    return True
                continue
            data = await target.get(each)
            if data is not None:
                await asyncio.to_thread(entries.verify, each, data, admit=admit)
                return True
    return False


async def _put(
    target: Store, name: str, entry: Frame, admit: Judge | None, replaceable: Container[bytes]
) -> bool:
    if not isinstance(target, TierStore):
        return await publish(target, entry, replaceable=replaceable, admit=admit)
    await target.put(name, entry.data)
    return True


async def _verified(store: Store, item: Item, admit: Judge | None) -> Frame | None:
    data = await store.get(item.name)
    if data is None:
        return None
    return await asyncio.to_thread(entries.verify, item.place, data, admit=admit)


async def _each(
    batches: AsyncIterator[list[Item]],
    work: Callable[[Item], Awaitable[None]],
    advance: _Advance,
) -> None:
    """Work on all of them, several at once; the first error ends it, when what runs has ended."""
    limit = asyncio.Semaphore(_CONCURRENCY)

    async def one(item: Item) -> S3CacheError | None:
        async with limit:
            try:
                await work(item)
            except StoreError as exc:
                return exc
            advance(1)
            return None

    async for batch in batches:
        for error in await asyncio.gather(*map(one, batch)):
            if error is not None:
                raise error
