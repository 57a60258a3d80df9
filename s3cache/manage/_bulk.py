"""Open a remote or a local tier; select, verify, copy and remove its entries in bounded memory.

Functions raise StoreError if a store refuses a request or does not answer. Changes that were made
before are kept.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import math
import re
import time
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
from s3cache.seam import hints
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
_BATCH = 256  # objects that are processed together, which bounds the memory
# A retrying store remembers the names of a listing, so a bucket is listed in 16 parts.
_PREFIXES = tuple(f"{entries.NAMES}{digit}" for digit in "0123456789abcdef")
_NAMESPACE = re.compile(r"[0-9a-f]{16}/(?=v1/)")
# The subject of a CorruptError for a frame of a later release, which may be sound.
_NEWER = "frame version"
# Prefixes of keys with entries that are used without a record.
_UNHIT = hints()

# Bytes of objects that may be in memory at once. A larger object is read alone.
_MAX_BYTES = 256 << 20

logger = logger_of()

_Advance: TypeAlias = Callable[[], object]


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


# -- selecting entries


@dataclass(frozen=True, slots=True)
class Item:
    """One object of a store with its header, if it was read, or the error in it.

    ``modified`` is a Unix time; in the local tier it is the last use.
    """

    name: str
    size: int
    modified: float
    about: Mapping[str, Any] | None = None
    problem: S3CacheError | None = None

    @property
    def place(self) -> str:
        """Return the name without the local tier's directory for the remote."""
        return _NAMESPACE.sub("", self.name, count=1)

    @property
    def key(self) -> str:
        return entries.key_of(self.name)

    @property
    def age_s(self) -> float:
        return time.time() - self.modified

    def values(self, field: str) -> tuple[str, ...]:
        """Return the values of a header field: an entry may have several signers."""
        value: Any = self.about[field] if self.about else ()
        return tuple(filter(None, (value,) if isinstance(value, str) else value))

    def has(self, field: str, wanted: str) -> bool:
        """Return whether a field has a value; ``2.13`` matches torch 2.13.0, ``2.1`` does not."""
        begins = tuple(f"{wanted}{mark}" for mark in ".+") if field == "torch" else ()
        return any(value == wanted or value.startswith(begins) for value in self.values(field))


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Conditions on entries; an entry must meet all of them. Without conditions, all entries match.

    A condition has the name of its option. An entry with an unreadable header meets no condition on
    headers except ``unreadable`` or ``untrusted``; if both are set, one of them is enough.
    """

    key: tuple[str, ...] = ()  # prefixes of keys
    manifest: frozenset[str] | None = None  # keys, or names of entries in a remote
    never_hit: frozenset[str] | None = None  # the keys that were hit; entries of others match
    older: float = -math.inf  # seconds since the last change (in a local tier: use) until `now`
    newer: float = math.inf
    min_size: int = 0
    max_size: float = math.inf
    kind: tuple[str, ...] = ()
    torch: tuple[str, ...] = ()
    device: tuple[str, ...] = ()
    tag: tuple[str, ...] = ()
    signer: tuple[str, ...] = ()
    unreadable: bool = False  # damaged or misplaced, but not of a later release
    untrusted: bool = False
    now: float = field(default_factory=time.time, compare=False)

    @property
    def asked(self) -> dict[str, tuple[str, ...]]:
        """Return the wanted values of headers, by field."""
        names = ("kind", "torch", "device", "tag", "signer")
        return {name: values for name in names if (values := getattr(self, name))}

    @property
    def needs_headers(self) -> bool:
        return self.unreadable or self.untrusted or bool(self.asked)

    def may_choose(self, item: Item) -> bool:
        """Return whether ``item`` meets the conditions that a listing can decide."""
        key, named, hit = item.key, self.manifest, self.never_hit
        age_s = self.now - item.modified
        return (
            (not self.key or key.startswith(self.key))
            and (named is None or key in named or item.place in named)
            and (hit is None or not (key in hit or key.startswith(_UNHIT)))
            and self.older <= age_s < self.newer
            and self.min_size <= item.size <= self.max_size
        )

    def chooses(self, item: Item) -> bool:
        """Return whether ``item``, with its header, meets all conditions."""
        problem = item.problem
        is_damaged = isinstance(problem, CorruptError) and problem.where != _NEWER
        is_refused = isinstance(problem, UntrustedError)
        has_problem = (self.unreadable and is_damaged) or (self.untrusted and is_refused)
        return (
            (has_problem or not (self.unreadable or self.untrusted))
            and self.may_choose(item)
            and all(any(item.has(name, it) for it in values) for name, values in self.asked.items())
        )


def read_manifest(where: str, lines: Iterable[str]) -> frozenset[str]:
    """Return the keys and names of objects in a manifest, which is named ``where`` in errors.

    A line is a key, the name of an object (``v1/3/KEY.0``), or a line of ``s3cache ls --json``.
    Text after a ``#`` is a comment. Raises ConfigError for any other line.
    """
    names = set()
    for number, line in enumerate(lines, 1):
        is_listed = line.startswith("{")
        text = line if is_listed else line.partition("#")[0].strip()
        if not text:
            continue
        try:
            name = _NAMESPACE.sub("", json.loads(text)["name"] if is_listed else text, count=1)
            key = entries.check_key(entries.key_of(name))
            if name != key and not name.startswith(entries.name_prefix(key)):
                raise ValueError
        except (KeyError, RecursionError, TypeError, ValueError):  # ConfigError is a ValueError
            thing, problem = f"manifest {where}, line {number}", f"{text[:60]!r} names no entry"
            fix = "write one key per line, or the output of s3cache ls --json"
            raise ConfigError(thing, problem, fix) from None
        names.add(name)
    return frozenset(names)


class Scan:
    """The selected entries of a place, in batches, in bounded memory.

    If a selection names entries of a remote, only those are listed: one request for each key.
    After the last batch, ``absent`` has the names without an entry. A value that no header has
    causes a warning: it may be misspelt. With ``headers``, headers are read even if the selection
    does not need them: one request each.
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
        self._unmet -= {it for it in self._unmet if any(item.has(*it) for item in there)}
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
        signers = [signature.signer for signature in unpack(head.signatures)]
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
    """Counts of outcomes for many entries, with the failures."""

    done: int = 0
    size: int = 0  # bytes of those that are done
    present: int = 0
    gone: int = 0  # removed by others meanwhile
    kept: int = 0  # not uploaded yet, or turned out to be sound
    failed: int = 0
    failures: list[tuple[str, str]] = field(default_factory=list)

    def fail(self, name: str, why: Exception | str) -> None:
        self.failed += 1
        self.failures.append((name, str(why)))


async def verify(scan: Scan, advance: _Advance) -> BatchResult:
    """Read every entry completely, and check all digests, its name, and its signatures."""

    async def verify_item(item: Item) -> str:
        return "done" if await _read_verified(scan.place, item) else "gone"

    return await _for_all(scan, verify_item, advance)


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

    async def remove_item(item: Item) -> str:
        if item.name in keep:
            return "kept"
        if item.problem is not None:
            again = await scan.read_header(item)
            if again is None or again.problem is None:
                return "gone" if again is None else "kept"
        await scan.place.store.delete(item.name)
        return "done"

    return await _for_all(scan, remove_item, advance)


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
        for candidate in [name] if target.is_local else entries.names_of(head.header):
            with contextlib.suppress(CorruptError, UntrustedError):
                there = await read_head(store, candidate, admit)
                if there is None or there.header.variant != head.header.variant:
                    continue
                # The digest does not cover signatures: a signed entry replaces an unsigned one.
                is_same = (there.digest, bool(there.signatures)) == wanted
                stays = is_same or admit(there.digest, there.signatures) is not None
                info = await store.head(candidate) if stays else None
                if info is not None and info.size == there.size:
                    return True
        return False

    async def copy_item(item: Item) -> str | Exception:
        try:
            head = await read_head(source.store, item.name, admit)
            if head is not None and await has(item.place, head):
                return "present"
            if (entry := await _read_verified(source, item)) is None:
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

    return await _for_all(scan, copy_item, advance)


async def _read_verified(place: EntryLocation, item: Item) -> Frame | None:
    data = await place.store.get(item.name)
    if data is None:
        return None
    return await asyncio.to_thread(entries.verify, item.place, data, admit=place.policy.check)


async def _for_all(
    scan: Scan, work: Callable[[Item], Awaitable[str | Exception]], advance: _Advance
) -> BatchResult:
    """Run ``work`` on all items, several at once, and count its results: names, or failures.

    The first StoreError is raised after its batch has ended.
    """
    result, budget = BatchResult(), Budget(_MAX_BYTES)

    async def call(item: Item) -> StoreError | None:
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
        advance()
        return None

    async for batch in scan.batches():
        for error in await concurrently(call, batch):
            if error is not None:
                raise error
    return result
