"""List the entries of a store, and read their headers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import TypeVar

from s3cache import entries, frame
from s3cache.errors import CorruptError, TruncatedError, UntrustedError
from s3cache.frame import Head, TrustCheck
from s3cache.manage._selection import FilterFeedback, HeaderSummary, Item, Selection
from s3cache.store import ObjectInfo, Store, listing
from s3cache.tier import cancel_all
from s3cache.trust import unpack

_T = TypeVar("_T")
_R = TypeVar("_R")

# Objects that are looked at together, which bounds the memory.
_BATCH = 256
# Requests at once.
_CONCURRENCY = 16
# A store that retries remembers the names of a listing, so a bucket is listed in sixteenths.
_PREFIXES = tuple(f"{entries.NAMES}{digit}" for digit in "0123456789abcdef")


async def scan(
    store: Store,
    selection: Selection | None = None,
    *,
    is_local: bool = False,
    heads: bool = False,
    admit: TrustCheck | None = None,
    feedback: FilterFeedback | None = None,
) -> AsyncGenerator[list[Item], None]:
    """Yield the objects of a store that are chosen, in batches: the memory does not grow.

    Where a selection names entries of a remote, nothing else is listed: one request for each key,
    several at once.

    Args:
        is_local: whether to list everything, not only where entries of a remote lie.
        heads: read headers even where nothing is chosen by them; one request each.
        admit: checks the signatures of an entry before its header is parsed.
        feedback: notes each header that was read, and at the end each name of the selection that
            has no entry.

    Raises:
        StoreError: the store cannot answer.
    """
    selection = selection or Selection()
    feedback = feedback or FilterFeedback(selection)
    needs_heads = heads or selection.needs_heads
    missing = set(selection.named or ())

    async def chosen(batch: list[Item]) -> list[Item]:
        if not needs_heads:
            return batch
        found = await concurrently(lambda item: read_about(store, item, admit), batch)
        there = [item for item in found if item is not None]
        for item in there:
            if item.about is not None:
                feedback.note(item.about)
        return [item for item in there if selection.chooses(item)]

    batch: list[Item] = []
    async with aclosing(_objects(store, selection, is_local)) as objects:
        async for info in objects:
            item = Item(info.key, info.size, info.modified)
            missing -= {item.key, item.place}
            if selection.may_choose(item):
                batch.append(item)
            if len(batch) == _BATCH:
                yield await chosen(batch)
                batch = []
    if batch:
        yield await chosen(batch)
    feedback.absent += sorted(missing)


async def _objects(
    store: Store, selection: Selection, is_local: bool
) -> AsyncGenerator[ObjectInfo, None]:
    if selection.named is None or is_local:
        for prefix in ("",) if is_local else _PREFIXES:
            async with listing(store, prefix) as objects:
                async for info in objects:
                    yield info
        return

    async def objects_of(key: str) -> list[ObjectInfo]:
        async with listing(store, entries.name_prefix(key)) as objects:
            return [info async for info in objects]

    keys = sorted({*map(entries.key_of, selection.named)}, key=entries.name_prefix)
    for at in range(0, len(keys), _BATCH):
        for infos in await concurrently(objects_of, keys[at : at + _BATCH]):
            for info in infos:
                yield info


async def concurrently(work: Callable[[_T], Awaitable[_R]], items: Iterable[_T]) -> list[_R]:
    """Return the results in order, with a bounded number at once; none runs on when this ends."""
    limit = asyncio.Semaphore(_CONCURRENCY)

    async def one(item: _T) -> _R:
        async with limit:
            return await work(item)

    tasks = [asyncio.ensure_future(one(item)) for item in items]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_all(tasks)


async def read_about(store: Store, item: Item, admit: TrustCheck | None = None) -> Item | None:
    """Return ``item`` with its header, or with what is wrong with it; ``None`` if it is gone.

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
    return replace(item, about=_summary(head))


async def read_head(store: Store, name: str, admit: TrustCheck | None = None) -> Head | None:
    """Return the verified header of an object; ``None`` where there is no object.

    Raises:
        CorruptError: the first bytes are not those of an entry.
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


def _summary(head: Head) -> HeaderSummary:
    """Return the fields by which one chooses; a field that is not as we write it is left out."""
    header = head.header
    made_by, components = header.meta.get("made_by"), header.meta.get("components")
    try:
        signers = tuple(each.statement.signer for each in unpack(head.signatures))
    except CorruptError:
        signers = ()
    tag = components.get("cache_key_tag") if isinstance(components, Mapping) else None
    return HeaderSummary(
        kind=header.kind,
        variant=header.variant,
        schema=header.schema,
        created_s=header.created_ns / 1e9,
        producer=header.producer,
        torch=_text(made_by, "torch"),
        # A component is a pair of its digest and a readable value.
        tag=_text({"tag": tag[-1]}, "tag") if isinstance(tag, list) and len(tag) == 2 else "",
        devices=tuple(_text(made_by, "device").split()),
        signers=signers,
    )


def _text(of: object, name: str) -> str:
    found = of.get(name) if isinstance(of, Mapping) else None
    return found if isinstance(found, str) else ""
