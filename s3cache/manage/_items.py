"""List the entries of a store, read their headers, and read manifests that name them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar

from s3cache import entries, frame
from s3cache.errors import ConfigError, CorruptError, S3CacheError, TruncatedError, UntrustedError
from s3cache.frame import Head, Judge
from s3cache.manage._selection import Selection
from s3cache.store import ObjectInfo, Store, listing
from s3cache.transfer import cancel_all
from s3cache.trust import unpack

__all__ = [
    "BATCH",
    "About",
    "Item",
    "about",
    "place_in",
    "read_about",
    "read_head",
    "read_manifest",
    "scan",
]

_T = TypeVar("_T")
_R = TypeVar("_R")

#: So many objects are looked at together: that bounds the memory, whatever there is in all.
BATCH = 256
# Headers read, and keys listed, at once.
_CONCURRENCY = 16
# A wrapper that tries again remembers the names of one listing. By the first digit of the spread
# that is a sixteenth of a bucket.
_PARTS = tuple(f"v1/{digit}" for digit in "0123456789abcdef")
# The local tier keeps the entries of each remote below a directory.
_NAMESPACE = re.compile(r"[0-9a-f]{16}/(?=v1/)")


@dataclass(frozen=True, slots=True)
class About:
    """What the header of an entry says, as far as one chooses by it.

    Attributes:
        kind: ``aot``, ``fx`` or ``shapes``.
        torch: the release that made it; ``""`` where it does not say.
        tag: torch's ``cache_key_tag``.
        devices: that it has code for, as ``cuda``; none where it does not say.
        signers: names of those who have signed it, as it says; proven by nothing.
        created_s: Unix time.
    """

    kind: str
    variant: str
    schema: int
    created_s: float
    producer: str
    torch: str = ""
    tag: str = ""
    signers: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Item:
    """One object.

    Attributes:
        name: in its store.
        size: bytes.
        modified: Unix time; in the local tier that of its last use.
        about: what its header says, if it was read and could be used.
        problem: why it could not; an ``UntrustedError`` or ``CorruptError``.
    """

    name: str
    size: int
    modified: float
    about: About | None = None
    problem: S3CacheError | None = None

    @property
    def place(self) -> str:
        """Its name below the remote that it is of."""
        return place_in(self.name)

    @property
    def key(self) -> str:
        """The key that it is under, if it is an entry."""
        return entries.key_of(self.name)


def place_in(name: str) -> str:
    """The name of an object without the directory that a local tier keeps it in."""
    return _NAMESPACE.sub("", name, count=1)


async def scan(
    store: Store,
    selection: Selection | None = None,
    *,
    is_local: bool = False,
    heads: bool = False,
    admit: Judge | None = None,
    absent: Callable[[str], object] = bool,
    seen: Callable[[About], object] = bool,
) -> AsyncGenerator[list[Item], None]:
    """The objects of a store that are chosen, some at a time, in memory that does not grow.

    Where a selection names entries of a remote, nothing else is listed: one request for each key,
    several at once.

    Args:
        is_local: whether all is listed, not only what is where entries of a remote lie.
        heads: read headers even where nothing is chosen by them; one request each.
        admit: checks the signatures of an entry before its header is parsed.
        absent: called at the end with each name of the selection that has no entry.
        seen: called with each header that was read, whether or not its entry is chosen.

    Raises:
        StoreError: the store cannot answer.
    """
    selection = selection or Selection()
    needs_heads = heads or selection.needs_heads
    missing = set(selection.named or ())

    async def chosen(batch: list[Item]) -> list[Item]:
        if not needs_heads:
            return batch
        found = await _together(lambda item: read_about(store, item, admit), batch)
        there = [item for item in found if item is not None]
        for item in there:
            if item.about is not None:
                seen(item.about)
        return [item for item in there if selection.chooses(item)]

    async with aclosing(_listings(store, selection, is_local)) as listings:
        async for objects in listings:
            batch: list[Item] = []
            async for info in objects:
                item = Item(info.key, info.size, info.modified)
                missing -= {item.key, item.place}
                if selection.admits(item):
                    batch.append(item)
                if len(batch) == BATCH:
                    yield await chosen(batch)
                    batch = []
            if batch:
                yield await chosen(batch)
    for name in sorted(missing):
        absent(name)


async def _listings(
    store: Store, selection: Selection, is_local: bool
) -> AsyncGenerator[AsyncIterator[ObjectInfo], None]:
    """What is there, a part at a time."""
    if selection.named is None or is_local:
        for part in ("",) if is_local else _PARTS:
            async with listing(store, part) as objects:
                yield objects
        return

    async def objects_of(key: str) -> list[ObjectInfo]:
        async with listing(store, entries.name_prefix(key)) as objects:
            return [info async for info in objects]

    keys = sorted({*map(entries.key_of, selection.named)}, key=entries.name_prefix)
    for at in range(0, len(keys), BATCH):
        yield _all_of(await _together(objects_of, keys[at : at + BATCH]))


async def _all_of(lists: Iterable[Iterable[_T]]) -> AsyncIterator[_T]:
    for each in chain.from_iterable(lists):
        yield each


async def _together(ask: Callable[[_T], Awaitable[_R]], about: Iterable[_T]) -> Sequence[_R]:
    """The answers, in order, several asked for at once; none is under way when this ends."""
    limit = asyncio.Semaphore(_CONCURRENCY)

    async def one(each: _T) -> _R:
        async with limit:
            return await ask(each)

    tasks = [asyncio.ensure_future(one(each)) for each in about]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_all(tasks)


async def read_about(store: Store, item: Item, admit: Judge | None = None) -> Item | None:
    """``item`` with what its header says, or with what is wrong with it; ``None`` if it is gone.

    Raises:
        StoreError: the store cannot answer.
    """
    try:
        head = await read_head(store, item.name, admit)
        if head is None:
            return None
        entries.check_place(item.place, head.header)
        if head.size != item.size:
            raise CorruptError("frame", f"is of {head.size} bytes, and {item.size} are there")
    except (CorruptError, UntrustedError) as exc:
        return replace(item, problem=exc)
    return replace(item, about=about(head))


async def read_head(store: Store, name: str, admit: Judge | None = None) -> Head | None:
    """What the first bytes of an object tell, verified; ``None`` where there is none.

    Raises:
        CorruptError: they are not those of an entry.
        UntrustedError: it is not admitted.
        StoreError: the store cannot answer.
    """
    length = frame.HEADER_HINT_BYTES
    while True:
        data = await store.get_range(name, 0, length)
        if data is None:
            return None
        try:
            return frame.decode_head(data, admit=admit)
        except TruncatedError as exc:
            if exc.needed <= length:
                raise
            length = exc.needed


def about(head: Head) -> About:
    """What a header says, as far as one chooses by it; what is not as we write it is left out."""
    header = head.header
    made_by, components = header.meta.get("made_by"), header.meta.get("components")
    try:
        signers = tuple(each.statement.signer for each in unpack(head.signatures))
    except CorruptError:
        signers = ()
    return About(
        kind=header.kind,
        variant=header.variant,
        schema=header.schema,
        created_s=header.created_ns / 1e9,
        producer=header.producer,
        torch=_text(made_by, "torch"),
        tag=_value(components, "cache_key_tag"),
        devices=tuple(_text(made_by, "device").split()),
        signers=signers,
    )


def _text(of: object, name: str) -> str:
    found = of.get(name) if isinstance(of, Mapping) else None
    return found if isinstance(found, str) else ""


def _value(components: object, name: str) -> str:
    """The readable value of a component, which is a pair of its digest and that."""
    found = components.get(name) if isinstance(components, Mapping) else None
    is_pair = isinstance(found, list) and len(found) == 2
    value = found[1] if is_pair else None  # type: ignore[index]
    return value if isinstance(value, str) else ""


# -- manifests


_SHOWN = 60


def read_manifest(where: str, lines: Iterable[str]) -> list[str]:
    """The keys, and names of objects, that a manifest has, in its order and each once.

    A line is a key, the name of an object as ``v1/3f2/KEY.0``, or what ``s3cache ls --json``
    prints of one; what follows a ``#`` is a comment.

    Args:
        where: what errors call it.

    Raises:
        ConfigError: a line is something else.
    """
    found: dict[str, None] = {}
    for number, line in enumerate(lines, 1):
        if (
            text := line.strip()
            if line.lstrip().startswith("{")
            else line.partition("#")[0].strip()
        ):
            name = place_in(_name_in(text))
            if not _is_name(name):
                raise ConfigError(
                    f"manifest {where}, line {number}",
                    f"{text[:_SHOWN]!r} names no entry",
                    "give one key to a line, or what s3cache ls --json prints",
                )
            found[name] = None
    return [*found]


def _name_in(text: str) -> str:
    if not text.startswith("{"):
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    name = value.get("name") or value.get("key")
    return name if isinstance(name, str) else ""


def _is_name(name: str) -> bool:
    key = entries.key_of(name)
    try:
        entries.check_key(key)
    except ConfigError:
        return False
    return name == key or name.startswith(entries.name_prefix(key))
