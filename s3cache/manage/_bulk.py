"""Open a remote or a local tier; list, verify, copy and remove its entries in bounded memory.

Functions raise StoreError if a store refuses a request or does not answer. Changes that were made
before are kept.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import math
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Container, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from s3cache import entries
from s3cache.errors import (
    ConfigError,
    CorruptError,
    S3CacheError,
    StoreError,
    TransientError,
    UntrustedError,
)
from s3cache.frame import Frame, Head
from s3cache.manage._selection import Item, Selection
from s3cache.settings import Settings
from s3cache.store import (
    FileLocation,
    ObjectInfo,
    RetryingStore,
    Store,
    concurrently,
    open_store,
    parse_url,
)
from s3cache.tier import Budget, DiskTier, TierStore, background, namespace_of, read_head
from s3cache.trust import Policy, unpack
from s3cache.util.logs import logger_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from s3cache.options import Options

_CLOSE_S = 5.0
# How many objects are processed together, which bounds the memory.
_BATCH = 256
# A retrying store remembers the names of a listing, so a bucket is listed in 16 parts.
_PREFIXES = tuple(f"{entries.NAMES}{digit}" for digit in "0123456789abcdef")
# How many bytes of objects may be in memory at once. A larger object is read alone.
_MAX_BYTES = 256 << 20

logger = logger_of()

_Advance: TypeAlias = Callable[[int], object]


@dataclass(frozen=True)
class EntryLocation(contextlib.AbstractContextManager["EntryLocation"]):
    """A store of entries and its trust policy; as a context manager it closes the store."""

    store: Store
    is_local: bool
    policy: Policy

    async def to_upload(self) -> set[str]:
        """Return the pending uploads in a local tier; none for a remote."""
        return await self.store.recorded() if isinstance(self.store, TierStore) else set()

    async def left_for_others(self) -> dict[str, int]:
        """Count the uploads that wait in a local tier for other remotes, by their URLs."""
        return await self.store.left_for_others() if isinstance(self.store, TierStore) else {}

    def __exit__(self, *_: object) -> None:
        """Close the store within a few seconds."""
        with contextlib.suppress(S3CacheError, concurrent.futures.TimeoutError):
            background().wait(self.store.aclose(), _CLOSE_S)


def url_of(settings: Settings) -> str:
    """Return the remote's URL, or raise ConfigError if there is none."""
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
) -> EntryLocation:
    """Open the remote of ``url`` and the environment, or the local tier for that remote.

    Args:
        in_tier: open the local tier, not the remote.
        of_all: include the entries of all remotes in the local tier.
        to_fill: create a missing directory, like a job; without this, it is an error.
    """
    settings, of_store = Settings.load(url, **options)
    policy = settings.trust_policy()
    if in_tier:
        identity = "" if settings.url is None else parse_url(settings.url, **of_store).identity
        tier = DiskTier(
            settings.local_dir,
            namespace="" if of_all else namespace_of(identity),
            max_bytes=settings.local_max_bytes,
            max_files=settings.local_max_files,
        )
        return EntryLocation(TierStore(tier), True, policy)
    remote = url_of(settings)
    if not to_fill and isinstance(parse_url(remote, **of_store), FileLocation):
        of_store["create"] = False
    store = RetryingStore(open_store(remote, **of_store), settings.retry_policy)
    return EntryLocation(store, False, policy)


class Scan:
    """The selected entries of a place, in batches, in bounded memory.

    If a selection names entries of a remote, only those are listed: one request for each key.
    After the last batch, ``absent`` has the names without an entry. A value that no header has
    causes a warning: it may be misspelt.

    Args:
        headers: read headers even if the selection does not need them; one request each.
    """

    def __init__(
        self, place: EntryLocation, selection: Selection | None = None, *, headers: bool = False
    ) -> None:
        self.place = place
        self.selection = selection or Selection()
        self.absent: list[str] = []
        self._unmet = {(n, value) for n, values in self.selection.asked.items() for value in values}
        self._reads_headers = headers or self.selection.needs_headers

    async def batches(self) -> AsyncGenerator[list[Item], None]:
        missing = set(self.selection.manifest or ())
        batch: list[Item] = []
        async with aclosing(self._objects()) as objects:
            async for info in objects:
                item = Item(info.key, info.size, info.modified)
                missing -= {item.key, item.place}
                if self.selection.may_choose(item):
                    batch.append(item)
                if len(batch) == _BATCH:
                    yield await self._chosen(batch)
                    batch = []
        if batch:
            yield await self._chosen(batch)
        self.absent = sorted(missing)
        for option, value in sorted(self._unmet):
            logger.warning("no entry has --%s %s", option, value)

    async def _objects(self) -> AsyncGenerator[ObjectInfo, None]:
        prefixes: Iterable[str] = ("",) if self.place.is_local else _PREFIXES
        if self.selection.manifest is not None and not self.place.is_local:
            keys = map(entries.key_of, self.selection.manifest)
            prefixes = sorted({entries.name_prefix(key) for key in keys})
        for prefix in prefixes:
            async for info in self.place.store.list(prefix):
                yield info

    async def _chosen(self, batch: list[Item]) -> list[Item]:
        if not self._reads_headers:
            return batch
        there = [item for item in await concurrently(self.read_header, batch) if item is not None]
        self._unmet -= {each for each in self._unmet if any(item.has(*each) for item in there)}
        return [item for item in there if self.selection.chooses(item)]

    async def read_header(self, item: Item) -> Item | None:
        """Return ``item`` with its header, or with its error; None if the object is gone."""
        try:
            head = await read_head(self.place.store, item.name, self.place.policy.check)
            if head is None:
                return None
            entries.check_place(item.place, head.header)
            if head.size != item.size:
                raise CorruptError("frame", f"has {item.size} bytes instead of {head.size}")
        except (CorruptError, UntrustedError) as exc:
            return replace(item, problem=exc)
        return replace(item, about=_about(head))


def _about(head: Head) -> dict[str, Any]:
    """Return the fields for selections; malformed fields are empty, signers are not verified."""
    header = head.header
    made_by, components = (
        value if isinstance(value := header.meta.get(name), Mapping) else {}
        for name in ("made_by", "components")
    )
    tag = components.get("cache_key_tag")  # its digest and a readable value
    try:
        signers = [each.signer for each in unpack(head.signatures)]
    except CorruptError:
        signers = []
    return {
        **{name: getattr(header, name) for name in ("kind", "variant", "schema", "producer")},
        "created_s": header.created_ns / 1e9,
        "torch": _text(made_by.get("torch")),
        "device": _text(made_by.get("device")).split(),
        "tag": _text(tag[-1]) if isinstance(tag, list) and len(tag) == 2 else "",
        "signer": signers,
    }


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


# -- work on many entries


@dataclass
class BatchResult:
    """Counts of outcomes for many entries, with the failures.

    ``gone`` entries were removed by others meanwhile, ``kept`` entries are not uploaded yet or
    turned out to be sound, and ``size`` is the number of bytes of those that are done.
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
        self.failures.append((name, str(why)))


async def verify(scan: Scan, advance: _Advance) -> BatchResult:
    """Read every entry completely, and check all digests, its name, and its signatures."""

    async def one(item: Item) -> str:
        return "done" if await _verified(scan.place, item) else "gone"

    return await _each(scan, one, advance)


async def age_beyond(scan: Scan, max_bytes: int) -> float:
    """Return the age in seconds beyond which entries exceed ``max_bytes`` in all.

    The latest entries count first. The age is in whole minutes; infinity means that all fit.
    """
    sizes: Counter[int] = Counter()
    async for batch in scan.batches():
        for item in batch:
            sizes[int((scan.selection.now - item.modified) // 60)] += item.size
    for minutes in sorted(sizes):
        max_bytes -= sizes[minutes]
        if max_bytes < 0:
            return minutes * 60.0
    return math.inf


async def remove(scan: Scan, keep: Container[str], advance: _Advance) -> BatchResult:
    """Remove all entries except those with a name in ``keep``.

    An entry that was selected because it was unusable is read again: the network may have failed.
    """

    async def one(item: Item) -> str:
        if item.name in keep:
            return "kept"
        if item.problem is not None:
            again = await scan.read_header(item)
            if again is None or again.problem is None:
                return "gone" if again is None else "kept"
        await scan.place.store.delete(item.name)
        return "done"

    return await _each(scan, one, advance)


async def copy(scan: Scan, target: EntryLocation, advance: _Advance) -> BatchResult:
    """Copy every entry into ``target`` and verify it on the way; a second call copies the rest.

    If the target has an entry with the same digest, and signed likewise, only its header is read
    and it stays. Another entry of the same variant stays if the copy is from a local tier to a
    remote, or if a trusted key has signed it; otherwise it may be forged, and is replaced. In a
    local tier an entry keeps its name; in a remote it is published like a new entry. Transient
    errors of a server are counted.
    """
    source, admit = scan.place, scan.place.policy.check
    replaceable = entries.Replaceable(everything=not source.is_local)

    async def has(name: str, head: Head) -> bool:
        """Return whether the target has this entry, or another one that must stay."""
        store, wanted = target.store, (head.digest, bool(head.signatures))
        for each in [name] if target.is_local else entries.names_of(head.header):
            with contextlib.suppress(CorruptError, UntrustedError):
                there = await read_head(store, each, admit)
                if there is None or there.header.variant != head.header.variant:
                    continue
                # The digest does not cover signatures: a signed entry replaces an unsigned one.
                is_same = (there.digest, bool(there.signatures)) == wanted
                stays = is_same or admit(there.digest, there.signatures) is not None
                info = await store.head(each) if stays else None
                if info is not None and info.size == there.size:
                    return True
        return False

    async def one(item: Item) -> str | Exception:
        try:
            head = await read_head(source.store, item.name, admit)
            if head is not None and await has(item.place, head):
                return "present"
            if (entry := await _verified(source, item)) is None:
                return "gone"
            if target.is_local:
                await target.store.put(item.place, entry.data)
            elif not await entries.publish(
                target.store, entry, replaceable=replaceable, admit=admit
            ):
                return "present"
            return "done"
        except TransientError as exc:
            return exc

    return await _each(scan, one, advance)


async def _verified(place: EntryLocation, item: Item) -> Frame | None:
    data = await place.store.get(item.name)
    if data is None:
        return None
    return await asyncio.to_thread(entries.verify, item.place, data, admit=place.policy.check)


async def _each(
    scan: Scan, work: Callable[[Item], Awaitable[str | Exception]], advance: _Advance
) -> BatchResult:
    """Run ``work`` on all items and count its results: the name of a count, or a failure.

    It works on several items at once. The first StoreError is raised after its batch has ended.
    """
    result, budget = BatchResult(), Budget(_MAX_BYTES)

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
        advance(1)
        return None

    async for batch in scan.batches():
        for error in await concurrently(one, batch):
            if error is not None:
                raise error
    return result
