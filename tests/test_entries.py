"""Names of entries in a store, and publishing: concurrent writers lose no variant."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import pytest

from s3cache import entries, frame
from s3cache.entries import Replaceable, digest_of
from s3cache.errors import ConfigError, CorruptError, TransientError
from s3cache.frame import Frame
from s3cache.store import LONGEST_NAME_BYTES, MemoryStore, MeteredStore, S3Options, Store
from tests.support.caching import KEY, OTHER, broken, entry, payload
from tests.support.contract import listed
from tests.support.faulty import Fault, FaultyStore
from tests.support.stores import RacyStore, variants

SOUND = entry(variant="a").data


async def publish(store: Store, *found: Frame) -> None:
    await asyncio.gather(*(entries.publish(store, each, replaceable=()) for each in found))


# -- names


def test_illegal_keys_and_variants_and_other_keys_are_refused() -> None:
    for key in ("", "A", "a.b", "a/b", "-a", "_", "é", "a" * 129, "a\n", ".."):
        with pytest.raises(ConfigError, match="use a hexadecimal digest"):
            entries.check_key(key)
    for variant in ("0", "_", "-a", "A", "a.b", "a" * 65, "a/b", "a\n"):
        with pytest.raises(ConfigError, match="variant"):
            entries.check_entry(KEY, entry(variant=variant))
    with pytest.raises(ConfigError, match="not the key in the frame"):
        entries.check_entry(OTHER, entry(KEY))


def test_a_labelled_key_depends_on_labels_and_texts_and_has_a_digest_of_each() -> None:
    keys = [
        entries.labelled_key("x-", parts)
        for parts in (
            [("torch", "2.13"), ("code", "a" * 1_000)],
            [("torch", "2.13"), ("code", "a" * 1_000 + "b")],
            [("torch", "2.13"), ("text", "a" * 1_000)],
        )
    ]
    assert len(set(keys)) == 3
    one, other, _ = (key.components for key in keys)
    assert [label for label in one if one[label] != other[label]] == ["code"]
    assert max(len(text) for _, text in one.values()) == 100
    assert entries.check_key(keys[0]) == keys[0]
    assert keys[0].endswith(digest_of({label: digest for label, (digest, _) in one.items()}))


def test_names_of_different_keys_and_variants_differ_and_no_prefix_finds_another_key() -> None:
    keys, variants = ("a", "ab", "a-b", "a_b", "0", "a0"), ("", "00", "a", "a-0")
    names = [*map(entries.first_name, keys)]
    names += [entries.variant_name(key, variant) for key in keys for variant in variants]
    assert len({*names}) == 6 * 5
    assert sum(name.startswith(entries.name_prefix("a")) for name in names) == 5


@pytest.mark.parametrize("damage", [broken, lambda found: found.data[:-1], lambda found: b""])
def test_only_intact_bytes_under_their_own_name_become_an_entry(
    damage: Callable[[Frame], bytes],
) -> None:
    sound = entry(variant="v", payload=b"compiled")
    for name in entries.names_of(sound.header):
        assert payload(entries.verify(name, sound.data)) == b"compiled"
        with pytest.raises(CorruptError):
            entries.verify(name, damage(sound))
    others = [(OTHER, "v"), (KEY, "w"), (KEY, "")]
    for name in (entries.first_name(OTHER), *(entries.variant_name(*each) for each in others)):
        with pytest.raises(CorruptError, match="has key"):
            entries.verify(name, sound.data)
    for variant in ("0", "_"):  # its name could be that of another entry
        odd = entry(variant=variant)
        for name in entries.names_of(odd.header):
            with pytest.raises(CorruptError, match="has key"):
                entries.verify(name, odd.data)


COMPONENTS = {"gm": ["1" * 32, "graph of 6 nodes"], "torch.version": ["2" * 32, "2.13.0"]}
NAMED = {name: digest for name, (digest, _) in COMPONENTS.items()}


def graph_entry(components: object) -> Frame:
    key, meta = f"a{digest_of(NAMED)}", {"components": components}
    return frame.decode(frame.encode(kind="aot", key=key, sections={}, meta=meta))


def test_the_key_of_a_graph_must_match_its_components() -> None:
    """Otherwise the entry was made for another graph, machine or setting, even if it is signed."""
    sound = graph_entry(dict(reversed(COMPONENTS.items())))
    name = entries.first_name(sound.header.key)
    assert entries.verify(name, sound.data).header.kind == "aot"
    for other in (
        {**COMPONENTS, "gm": ["3" * 32, "graph of 6 nodes"]},
        {**COMPONENTS, "more": ["3" * 32, ""]},
        {"gm": COMPONENTS["gm"]},
        {},
    ):
        with pytest.raises(CorruptError, match="components of another key"):
            entries.verify(name, graph_entry(other).data)
    nothing: tuple[object, ...] = (None, [], {"gm": "1" * 32}, {"gm": ["1" * 32]}, {"gm": 1})
    for none in nothing:
        with pytest.raises(CorruptError, match="lacks the components of its key"):
            entries.verify(name, graph_entry(none).data)


# -- publishing


async def test_the_first_entry_costs_one_put_and_publish_returns_what_it_wrote() -> None:
    for other in (MemoryStore(), RacyStore()):
        assert await entries.publish(other, entry(), replaceable=())
        assert not await entries.publish(other, entry(), replaceable=())
    store = MeteredStore(MemoryStore())
    await publish(store, entry())
    calls = {verb: stats.calls for verb, stats in store.snapshot().items() if stats.calls}
    assert calls == {"atomic_create": 1, "put": 1}
    assert [*await listed(store.inner)] == [entries.first_name(KEY)]


@pytest.mark.parametrize("store", [MemoryStore(), RacyStore()])
async def test_all_variants_that_are_published_at_once_are_stored(store: Store) -> None:
    await publish(store, *(entry(variant=f"v{number}") for number in range(8)))
    assert await variants(store) == {f"v{number}" for number in range(8)}
    assert await store.get(entries.first_name(KEY)) is not None


async def test_a_variant_that_is_published_twice_keeps_its_first_entry() -> None:
    store = MemoryStore()
    await publish(store, entry(variant="a", payload=b"first"), entry(variant="b"))
    for variant in ("a", "b"):
        await publish(store, entry(variant=variant, payload=b"second"))
    assert len(await listed(store)) == 2
    data = await store.get(entries.first_name(KEY))
    assert data is not None
    assert payload(frame.decode(data)) == b"first"


@pytest.mark.parametrize(
    "damaged",
    [
        *(b"", b"no frame", SOUND[:60], SOUND[:-1], bytes(SOUND) + b"<html>", b"\x00" * 20_000),
        broken(entry(variant="b")),  # of another variant
        entry(OTHER, "a").data,
        entry(KEY, "0").data,
    ],
    ids=range(9),
)
async def test_unusable_entries_are_overwritten(damaged: bytes) -> None:
    store = MemoryStore()
    await store.put(entries.first_name(KEY), damaged)
    await publish(store, entry(variant="a"))
    assert await variants(store) == {"a"}
    assert [*await listed(store)] == [entries.first_name(KEY)]


@pytest.mark.parametrize(("fault", "times"), [("bit_flip", 1), ("bit_flip", 2), ("truncate", 1)])
async def test_damage_in_transit_keeps_the_stored_entry(fault: Fault, times: int) -> None:
    store = MemoryStore()
    await publish(store, entry(variant="a"))
    faulty = FaultyStore(store, seed=3)
    for _ in range(20):
        faulty.inject("get", fault, times=times)
        with contextlib.suppress(TransientError):
            await publish(faulty, entry(variant="b"))
        faulty.clear()
        assert "a" in await variants(store)


def test_replaceable_is_bounded_and_forgets_the_oldest() -> None:
    replaceable = Replaceable(everything=False)
    digests = [number.to_bytes(32, "big") for number in range(2 * Replaceable.MAX_COUNT)]
    for digest in digests:
        replaceable.add(digest)
        replaceable.add(digests[0])  # the digest that is added again stays
    assert sum(each in replaceable for each in digests) == Replaceable.MAX_COUNT
    assert digests[0] in replaceable
    assert digests[1] not in replaceable
    assert digests[-1] in replaceable


async def test_a_replaceable_entry_is_replaced_by_its_own_variant_only() -> None:
    store = MemoryStore()
    there, ours = entry(variant="a", payload=b"old"), entry(variant="a", payload=b"new")
    replaceable = Replaceable(everything=False)
    replaceable.add(there.digest)
    await store.put(entries.first_name(KEY), there.data)
    await entries.publish(store, entry(variant="b"), replaceable=replaceable)
    assert await store.get(entries.first_name(KEY)) == there.data
    await entries.publish(store, ours, replaceable=replaceable)
    assert await store.get(entries.first_name(KEY)) == ours.data


def test_names_spread_over_sixteen_directories_and_fit_below_the_longest_prefix() -> None:
    """S3 divides its load by prefix; each new directory costs the local tier a call."""
    names = [entries.first_name(f"key-{number}") for number in range(500)]
    assert {name.split("/")[1] for name in names} == set("0123456789abcdef")
    longest = entries.variant_name("k" * 128, "v" * 64)
    assert len(longest) == LONGEST_NAME_BYTES
    options = S3Options("bucket", "p" * (1024 - 1 - LONGEST_NAME_BYTES))
    with pytest.raises(ConfigError):
        S3Options("bucket", f"{options.prefix}p")
