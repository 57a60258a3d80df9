"""Hints lead to the entry that is nearest to a key, in few requests; no lookup reads them."""

from __future__ import annotations

import asyncio
import hashlib
import zlib
from typing import TYPE_CHECKING, Any

import pytest

from s3cache import entries, frame, hints
from s3cache.catalog import Selection, copy, remove, scan
from s3cache.entries import digest_of
from s3cache.errors import AccessDeniedError
from s3cache.store import MemoryStore, WrapperStore
from tests.support.caching import open_cache

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from s3cache.frame import Frame
    from s3cache.store import ObjectInfo


def components(**values: str) -> dict[str, tuple[str, str]]:
    given = {"gm": "g", "aot_config": "c", "torch.version": "2.12.1", **values}
    return {
        name: (hashlib.sha256(value.encode()).hexdigest()[:32], value)
        for name, value in given.items()
    }


def key_of(of: dict[str, tuple[str, str]]) -> str:
    return "a" + digest_of({name: digest for name, (digest, _) in of.items()})


def entry(of: dict[str, tuple[str, str]], **changes: Any) -> Frame:
    given = {
        "kind": "aot",
        "key": key_of(of),
        "sections": {"entry": b"e", "parts": b'{"gm": {"code": "x"}}'},
        "meta": {"components": {name: list(pair) for name, pair in of.items()}},
        **changes,
    }
    return frame.decode(frame.encode(**given))


class CountingStore(WrapperStore):
    """Counts requests as S3 has them: a listing takes one for each thousand names."""

    requests = 0

    async def _around(self, verb: str, key: str, call: Any) -> Any:
        self.requests += 1
        return await call()

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        seen = 0
        async for info in self.inner.list(prefix):
            self.requests += seen % 1000 == 0
            seen += 1
            yield info
        self.requests += not seen


async def found(store: Any, of: dict[str, tuple[str, str]]) -> str | None:
    hint = await hints.find(store, of, key_of(of))
    return None if hint is None else hint.key


async def test_a_hint_says_what_the_entry_says() -> None:
    store, of = MemoryStore(), components()
    await hints.write(store, entry(of))
    hint = await hints.find(store, components(grad_enabled="False"), "a")
    assert hint is not None
    assert (hint.key, hint.components, hint.parts) == (key_of(of), of, {"gm": {"code": "x"}})


async def test_of_one_graph_that_with_the_most_in_common_is_found() -> None:
    store = MemoryStore()
    near = components(**{"torch.version": "2.11.0"})
    far = components(**{"torch.version": "2.10.0", "example_inputs": "other"})
    for of in (far, near):
        await hints.write(store, entry(of))
    assert await found(store, components()) == key_of(near)


async def test_where_no_entry_has_the_graph_one_of_the_program_is_found() -> None:
    store, of = MemoryStore(), components(gm="before it was edited")
    await hints.write(store, entry(of))
    assert await found(store, components()) == key_of(of)
    assert await found(store, components(aot_config="another program")) is None


async def test_the_entry_itself_is_not_what_is_near() -> None:
    store = MemoryStore()
    await hints.write(store, entry(components()))
    assert await found(store, components()) is None


@pytest.mark.parametrize("graphs", ["one", "each its own"])
async def test_it_takes_few_requests_however_many_entries_there_are(graphs: str) -> None:
    store, near = MemoryStore(), components(**{"torch.version": "2.11.0"})
    await hints.write(store, entry(near))
    (name, _) = [info.key async for info in store.list(hints.NAMES)]
    folder = name.rpartition("/")[0]
    for number in range(100_000):
        digest = hashlib.sha256(str(number).encode()).hexdigest()
        place = folder if graphs == "one" else f"{hints.NAMES}{digest[:32]}"
        await store.put(f"{place}/{'f' * 40}.a{digest}", b"")
    counting = CountingStore(store)
    assert await found(counting, components()) == key_of(near)
    assert counting.requests <= 20
    assert counting.requests == (9 if graphs == "one" else 2)
    counting.requests = 0
    await found(counting, components(gm="h"))
    assert counting.requests <= 20


@pytest.mark.parametrize(
    "data", [b"", b"x", zlib.compress(b"[]"), zlib.compress(b'{"components": {"gm": 3}}'),
             zlib.compress(b"[" * 100_000)]
)  # fmt: skip
async def test_what_is_no_hint_is_none(data: bytes) -> None:
    store, near = MemoryStore(), components(**{"torch.version": "2.11.0"})
    await hints.write(store, entry(near))
    for info in [info async for info in store.list(hints.NAMES)]:
        await store.put(info.key, data)
    assert await found(store, components()) is None


async def test_a_hint_of_another_key_than_its_name_says_is_none() -> None:
    store = MemoryStore()
    await hints.write(store, entry(components(**{"torch.version": "2.11.0"})))
    for info in [info async for info in store.list(hints.NAMES)]:
        data = await store.get(info.key)
        assert data is not None
        await store.delete(info.key)
        await store.put(info.key[:-64] + "0" * 64, data)
    assert await found(store, components()) is None


async def test_an_entry_without_a_graph_has_no_hint() -> None:
    store = MemoryStore()
    for meta in (
        {},
        {"components": 3},
        {"components": {"gm": 1}},
        {"components": {"tag": ["0", "t"]}},
    ):
        await hints.write(store, entry(components(), kind="test", meta=meta))
    assert [info async for info in store.list()] == []


async def test_a_store_that_refuses_hints_is_no_matter() -> None:
    class Refusing(MemoryStore):
        async def put(self, *_: Any, **__: Any) -> None:
            raise AccessDeniedError("no")

    await hints.write(Refusing(), entry(components()))


def test_hints_are_written_with_the_upload_and_go_with_the_entry(tmp_path: Path) -> None:
    store, of = MemoryStore(), components()
    other = components(gm="h")
    with open_cache(tmp_path / "a", store, hints=True) as cache:
        for each in (of, other):
            cache.save(key_of(each), entry(each))
        assert cache.flush(60).complete
        before = _hints(store)
        assert len(before) == 4
        assert cache.remove(key_of(of)) > 0
        assert {name for name in before if key_of(other) in name} == _hints(store)
        assert cache.clear() > 0
        assert _hints(store) == set()


def _hints(store: MemoryStore) -> set[str]:
    import asyncio

    async def names() -> set[str]:
        return {info.key async for info in store.list() if not info.key.startswith(entries.NAMES)}

    return asyncio.run(names())


async def test_who_looks_after_a_store_does_not_take_hints_for_entries() -> None:
    store, of = MemoryStore(), components()
    for each in (of, components(gm="h")):
        await entries.publish(store, entry(each), replaceable=())
        await hints.write(store, entry(each))
    listed = [item.name async for batch in scan(store) for item in batch]
    assert len(listed) == 2
    tally = await remove(store, scan(store, Selection(keys=(key_of(of),))))
    assert tally.done == 1
    left = [info.key async for info in store.list(hints.NAMES)]
    assert len(left) == 2
    assert all(key_of(of) not in name for name in left)


def test_none_are_written_unless_asked_for(tmp_path: Path) -> None:
    store, of = MemoryStore(), components()
    with open_cache(tmp_path / "a", store) as cache:
        cache.save(key_of(of), entry(of))
        assert cache.flush(60).complete
    assert asyncio.run(found(store, of)) is None


async def _copied(source: Any, target: Any, **more: Any) -> Any:
    return await copy(source, target, scan(source), **more)


async def test_hints_go_with_the_entries_that_are_copied_and_no_others() -> None:
    """Done again, what is new; what is no hint stays where it is."""
    source, target = MemoryStore(), MemoryStore()
    chosen, other = components(), components(grad_enabled="False")
    for of in (chosen, other):
        await entries.publish(source, entry(of), replaceable=())
        await hints.write(source, entry(of))
    forged = f"{hints.NAMES}{'0' * 32}/x.{key_of(chosen)}"
    await source.put(forged, zlib.compress(b"{}"))

    tally = await copy(source, target, scan(source, Selection(keys=(key_of(chosen),))))
    assert (tally.done, tally.hints) == (1, 2)
    assert {name.rpartition(".")[2] for name in await names_of_hints(target)} == {key_of(chosen)}
    assert forged not in await names_of_hints(target)
    assert await found(target, other) == key_of(chosen)

    again = await _copied(source, target)
    assert (again.done, again.present, again.hints) == (1, 1, 2)
    assert len(await names_of_hints(target)) == 4
    assert (await _copied(source, target)).hints == 0


async def test_hints_of_a_few_keys_are_copied_without_a_listing_of_all() -> None:
    """By the names that they have: one request to read each, and one to write it."""
    source, target = CountingStore(MemoryStore()), CountingStore(MemoryStore())
    chosen, without = entry(components()), entry(components(gm="h"))
    for number in range(3000):
        await source.inner.put(f"{hints.NAMES}{number:032x}/x.a{number:064x}", b"")
    await hints.write(source.inner, chosen)
    keys = {chosen.header.key, without.header.key}
    names = [*hints.names_of(chosen.header), *hints.names_of(without.header)]
    await source.inner.put(names[2], b"no hint")

    assert await hints.copy(source, target, keys, names) == 2
    assert (source.requests, target.requests) == (4, 2)
    assert {*await names_of_hints(target)} == {*hints.names_of(chosen.header)}
    assert await hints.copy(source, target, keys, names) == 0
    assert await hints.copy(source, target, keys, []) == 0
    assert await hints.copy(source, target, (), names) == 0


async def test_a_named_entry_takes_its_hints_along_also_where_it_was_there() -> None:
    source, target = MemoryStore(), MemoryStore()
    chosen, other = components(), components(grad_enabled="False")
    for of in (chosen, other):
        await entries.publish(source, entry(of), replaceable=())
    named = Selection(named=frozenset({key_of(chosen)}))
    assert (await copy(source, target, scan(source, named), few=True)).hints == 0
    for of in (chosen, other):
        await hints.write(source, entry(of))
    tally = await copy(source, target, scan(source, named), few=True)
    assert (tally.done, tally.present, tally.hints) == (0, 1, 2)
    assert {name.rpartition(".")[2] for name in await names_of_hints(target)} == {key_of(chosen)}


async def test_hints_are_written_anew_where_that_is_asked_for() -> None:
    source, target, of = MemoryStore(), MemoryStore(), components()
    await entries.publish(source, entry(of), replaceable=())
    assert (await _copied(source, target)).done == 1
    assert await names_of_hints(target) == []
    await target.delete(entries.first_name(key_of(of)))
    assert (await _copied(source, target, write_hints=True)).done == 1
    assert len(await names_of_hints(target)) == 2


async def test_whoever_may_not_write_hints_copies_entries() -> None:
    class Narrow(WrapperStore):
        async def put(self, key: str, *args: Any, **more: Any) -> None:
            if key.startswith(hints.NAMES):
                raise AccessDeniedError("not your right")
            await super().put(key, *args, **more)

    source, target, of = MemoryStore(), Narrow(MemoryStore()), components()
    await entries.publish(source, entry(of), replaceable=())
    await hints.write(source, entry(of))
    tally = await _copied(source, target, write_hints=True)
    assert (tally.done, tally.failed, tally.hints) == (1, 0, 0)


async def names_of_hints(store: Any) -> list[str]:
    return [info.key async for info in store.list(hints.NAMES)]
