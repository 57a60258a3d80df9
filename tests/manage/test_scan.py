"""A scan lists entries in bounded memory, and selects those that match all given conditions."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from s3cache import entries
from s3cache.errors import CorruptError, UntrustedError
from s3cache.manage import EntryLocation, Item, Scan, Selection
from s3cache.store import FileStore, MemoryStore, Store
from s3cache.trust import Policy, generate, policy_of
from tests.support.shelves import Shelf
from tests.support.stores import CountingStore


def scan_of(store: Store, *args: Any, policy: Policy | None = None, **options: Any) -> Scan:
    return Scan(EntryLocation(store, False, policy or Policy()), *args, **options)


def found(shelf: Shelf, **options: Any) -> dict[str, Item]:
    scan = scan_of(FileStore(shelf.root, create=False), **options)

    async def listed() -> dict[str, Item]:
        return {item.name: item async for batch in scan.batches() for item in batch}

    return asyncio.run(listed())


def test_untrusted_entries_are_not_parsed(shelf: Shelf) -> None:
    name = shelf.add("k")
    policy = policy_of("require", generate("ci").public_text(), "", audience="main")
    item = found(shelf, headers=True, policy=policy)[name]
    assert isinstance(item.problem, UntrustedError)
    assert item.about is None


async def _watched(count: int) -> tuple[CountingStore, list[str]]:
    store, keys = CountingStore(MemoryStore()), [f"k{number}" for number in range(count)]
    for key in keys:
        await store.put(entries.first_name(key), b"nothing")
    return store, keys


async def test_a_scan_that_stops_early_reads_one_batch_only() -> None:
    store, _ = await _watched(600)
    batches = scan_of(store, headers=True).batches()
    first = await anext(batches)
    await batches.aclose()
    assert len(first) == store.heads == 256


async def test_named_entries_are_found_without_listing_all_others() -> None:
    """Ten of 2,000 objects: ten listings, of one object each."""
    store, keys = await _watched(2_000)
    names = frozenset(keys[:100:10]) | {"gone"}
    scan = scan_of(store, Selection(manifest=names))
    found = [item.key async for batch in scan.batches() for item in batch]
    assert {*found, "gone"} == names
    assert scan.absent == ["gone"]
    assert (store.listings, store.listed) == (11, 10)


async def test_a_scan_without_headers_reads_no_entry() -> None:
    store, _ = await _watched(20)
    assert (
        sum([len(batch) async for batch in scan_of(store, Selection(key=("k1",))).batches()]) == 11
    )
    assert store.heads == 0


# -- selections


NOW = time.time()
DAMAGED = Item("v1/0/abcdef.0", 1000, NOW - 86400, problem=CorruptError("frame", "is damaged"))
STRANGER = Item("v1/0/ab.0", 10, NOW, problem=UntrustedError("unsigned", "no signature"))


@pytest.mark.parametrize(
    ("words", "damaged", "stranger"),
    [
        ({}, True, True),
        ({"unreadable": True}, True, False),
        ({"untrusted": True}, False, True),
        ({"unreadable": True, "untrusted": True}, True, True),
        ({"unreadable": True, "key": ("x",)}, False, False),
        ({"kind": ("aot",)}, False, False),
        ({"torch": ("",)}, False, False),
    ],
)
def test_an_unreadable_entry_matches_no_condition_on_headers(
    words: dict[str, Any], damaged: bool, stranger: bool
) -> None:
    """So a removal of the entries of an old torch does not remove a damaged entry."""
    assert Selection(**words).chooses(DAMAGED) is damaged
    assert Selection(**words).chooses(STRANGER) is stranger
