"""Tests of the contract of stores. Subclass :class:`StoreContract` and provide a store."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, ClassVar, Protocol
from urllib.parse import urlsplit

import pytest

from s3cache.errors import ConfigError, PreconditionError
from s3cache.store import MAX_KEY_BYTES, NotAccepted, ObjectInfo, Store

ODD_KEYS = [
    "-rf", "=", "-.-", "trailing.", "trailing...", "nul.txt", "x.tmp", "0",
    "v1/3fa/a0123.0", "a/b-.c_/d=../e.", "con", "-/-/-",
]  # fmt: skip

LONG_KEYS = ["/".join(["k" * 200] * 4), "a/" * (MAX_KEY_BYTES // 2 - 1) + "aa"]

VERBS: dict[str, Callable[[Store, str], Awaitable[object]]] = {
    "get": lambda store, key: store.get(key),
    "get_range": lambda store, key: store.get_range(key, 1),
    "head": lambda store, key: store.head(key),
    "put": lambda store, key: store.put(key, b"x"),
    "create": lambda store, key: store.put(key, b"x", mode="create"),
    "delete": lambda store, key: store.delete(key),
}

_PREFIXES = ["", "a", "ab", "ab/", "ab/d", "ab/d/", "abc", "abcd", "A", "b", "a-", "a+", "z",
             "/", "a//", ".", "..", "../", "./", "ab/c/"]  # fmt: skip


async def listed(store: Store, prefix: str = "") -> dict[str, ObjectInfo]:
    """Return the listing by key; fail if an object is listed twice."""
    infos = [info async for info in store.list(prefix)]
    twice = [key for key, n in Counter(info.key for info in infos).items() if n > 1]
    assert not twice
    return {info.key: info for info in infos}


async def put_all(store: Store, keys: Iterable[str]) -> None:
    """Put a byte under each key, several at once."""
    slots = asyncio.Semaphore(32)

    async def put(key: str) -> None:
        async with slots:
            await store.put(key, b"x")

    await asyncio.gather(*map(put, keys))


async def _assert_holds(store: Store, key: str, data: bytes | None) -> None:
    """Assert that each way to read an object gives ``data``; ``None`` means no object."""
    size = None if data is None else len(data)
    assert await store.get(key) == data
    assert await store.get_range(key, size or 1) == data
    for info in (await store.head(key), (await listed(store, key)).get(key)):
        assert info is None or info.key == key
        found = None if info is None else info.size
        assert found == size


class RawAccess(Protocol):
    """Access to a store's objects without the store: with a plain client, or as plain files.

    ``litter`` leaves things that are not objects: half-written ones, and names no key can have.
    """

    async def read(self, key: str) -> bytes | None: ...
    async def write(self, key: str, data: bytes) -> None: ...
    async def remove(self, key: str) -> None: ...
    async def litter(self) -> None: ...


class StoreContract:
    """The promises of :class:`~s3cache.store.Store`, with a test for each.

    A subclass, named ``Test...``, has a fixture ``store`` that gives an empty store, and a fixture
    ``raw`` that gives access to its objects without the store. It lowers the numbers below if the
    store is slow. It must not override a test to promise less.
    """

    many: ClassVar[int] = 1_050  #: objects, more than a page of an S3 listing holds
    #: A multipart upload with several parts needs more; a subclass for S3 raises it.
    big_bytes: ClassVar[int] = (5 << 20) + 3
    racers: ClassVar[int] = 16  #: writers in each race
    secrets: ClassVar[tuple[str, ...]] = ()  #: must not appear in the URL

    def _big(self) -> bytes:
        return (bytes(range(251)) * (self.big_bytes // 251 + 1))[: self.big_bytes]

    # -- get, head, get_range

    async def test_round_trip(self, store: Store) -> None:
        array = bytearray(b"<some bytes>")
        small = (b"", b"x", bytes(4096), array, memoryview(b"some bytes"), memoryview(array)[1:-1])
        for buffer in (*small, self._big()):
            await store.put("a/key", buffer)
            await _assert_holds(store, "a/key", bytes(buffer))

    async def test_what_was_put_is_a_copy(self, store: Store) -> None:
        """A caller may reuse its buffer or write into the returned one: the object stays."""
        buffer = bytearray(b"before")
        await store.put("key", buffer)
        buffer[:] = b"after!"
        view = memoryview(await store.get("key") or b"")
        assert bytes(view) == b"before"
        if not view.readonly:
            view[0:1] = b"X"
        assert await store.get("key") == b"before"

    async def test_absent_is_none(self, store: Store) -> None:
        assert await listed(store) == await listed(store, "any/prefix") == {}
        await store.put("there/too", b"x")
        for key in ("absent", "there", "there/too/deep", "there/to"):
            await _assert_holds(store, key, None)

    async def test_range(self, store: Store) -> None:
        """It is shorter where the object is."""
        for data in (b"0123456789", b""):
            await store.put("key", data)
            for length in (1, 9, 10, 11, 1 << 40):
                assert await store.get_range("key", length) == data[:length]

    async def test_what_is_not_accepted_is_not_read(self, store: Store) -> None:
        """``accept_size`` gets the size first. If it refuses, the result is that size."""
        data = b"x" * 70_001
        await store.put("key", data)
        asked: list[int] = []

        def accept_size(size: int) -> bool:
            asked.append(size)
            return False

        assert await store.get("key", accept_size) == NotAccepted(70_001)
        assert await store.get("key", lambda size: size == 70_001) == data
        assert await store.get("absent", accept_size) is None
        assert set(asked) == {70_001}
        await store.put("key", b"")
        assert await store.get("key", lambda size: True) == b""

    async def test_modified_is_the_time_of_the_put(self, store: Store) -> None:
        """By the store's clock, in seconds since the epoch; listing and head agree."""
        await store.put("key", b"x")
        info = await store.head("key")
        assert info is not None
        assert abs(info.modified - time.time()) < 3_600
        # S3 returns milliseconds in a listing and whole seconds in a head.
        assert abs((await listed(store))["key"].modified - info.modified) <= 1

    # -- put, delete

    async def test_create_leaves_an_object_alone(self, store: Store) -> None:
        """A create succeeds again after a delete. An overwrite replaces the whole object."""
        await store.put("key", b"a long first version")
        with pytest.raises(PreconditionError):
            await store.put("key", b"second", mode="create")
        await _assert_holds(store, "key", b"a long first version")
        await store.put("key", b"third", metadata={})
        await _assert_holds(store, "key", b"third")
        await store.delete("key")
        await store.put("key", b"fourth", mode="create", metadata={"writer": "a test"})
        await _assert_holds(store, "key", b"fourth")

    async def test_one_creator_wins_a_race(self, store: Store) -> None:
        """The object is the winner's. A store promises this only if ``atomic_create`` is true."""
        await store.put("first", b"x", mode="create")  # shows the store how its server behaves
        if not await store.atomic_create():
            pytest.skip("the store does not promise atomic creation")
        bodies = [b"%03d" % i * 5_000 for i in range(self.racers)]
        for key in ("race/0", "race/1", "race/2", "race/3"):
            results = await asyncio.gather(
                *(store.put(key, body, mode="create") for body in bodies), return_exceptions=True
            )
            won = [body for body, r in zip(bodies, results, strict=True) if r is None]
            assert len(won) == 1
            assert {type(r) for r in results if r is not None} == {PreconditionError}
            assert await store.get(key) == won[0]

    # -- list

    async def test_prefix_is_a_string_not_a_path(self, store: Store) -> None:
        keys = {"ab", "abc", "ab/c", "ab/d/e", "a", "b/ab", "a-b", "a.b"}
        await put_all(store, keys)
        for prefix in _PREFIXES:
            expected = {key for key in keys if key.startswith(prefix)}
            assert set(await listed(store, prefix)) == expected, prefix

    async def test_list_of_many(self, store: Store) -> None:
        """No page of a listing is lost or repeated."""
        keys = {f"many/{i % 7}/{i:05d}" for i in range(self.many)}
        await put_all(store, keys)
        assert set(await listed(store, "many/")) == keys
        assert set(await listed(store, "many/3/")) == {k for k in keys if k.startswith("many/3/")}

    async def test_a_listing_may_be_left_and_used_meanwhile(self, store: Store) -> None:
        """A caller may use the store inside the loop over a listing, and may leave the loop."""
        keys = {f"k{i}" for i in range(5)}
        await put_all(store, keys)
        seen = set()
        async for info in store.list():
            assert await store.get(info.key) is not None
            await store.delete(info.key)
            seen.add(info.key)
        assert seen == keys
        await put_all(store, keys)
        async for _ in store.list():
            break
        assert set(await listed(store)) == keys

    # -- keys

    async def test_each_key_has_its_own_object(self, store: Store) -> None:
        """Odd keys, long keys and similar keys have separate objects until these are deleted."""
        keys = [*ODD_KEYS, *LONG_KEYS, "a", "a.b", "a/b", "a/b/c", "dot", "dot.", "dot.."]
        for i, key in enumerate(keys):
            await store.put(key, b"%d" % i, mode="create")
        for i, key in enumerate(keys):
            assert await store.get(key) == b"%d" % i
        assert set(await listed(store)) == {*keys}
        for i, key in enumerate(keys, start=1):
            for _ in range(2):  # an absent object may be deleted too
                await store.delete(key)
            assert await store.get(key) is None
            assert set(await listed(store)) == {*keys[i:]}

    async def test_an_illegal_key_is_refused(self, store: Store) -> None:
        """Each verb calls ``check_key``; ``store/test_base.py`` tests which keys it refuses."""
        for call in VERBS.values():
            with pytest.raises(ConfigError):
                await call(store, "a/../b")
        assert await listed(store) == {}

    # -- concurrency

    async def test_readers_see_one_whole_version(self, store: Store) -> None:
        """While writers overwrite an object, a reader never gets a mixture, a part or nothing."""
        versions = [bytes([i]) * (100_000 + 50_000 * i) for i in range(4)]
        await store.put("key", versions[0])

        async def write(version: bytes) -> None:
            for _ in range(5):
                await store.put("key", version)

        async def read(writing: asyncio.Future[Any]) -> None:
            while not writing.done():
                assert await store.get("key") in versions
                await asyncio.sleep(0)

        writing = asyncio.gather(*map(write, versions))
        await asyncio.gather(writing, *(read(writing) for _ in range(3)))
        assert set(await listed(store)) == {"key"}

    async def test_a_cancelled_put_is_whole_or_nothing(self, store: Store) -> None:
        old, new = b"old" * 50_000, b"new!" * 50_000
        await store.put("key", old)
        for wait_s in (0, 0.0005, 0.002, 0.005):
            task = asyncio.ensure_future(store.put("key", new))
            await asyncio.sleep(wait_s)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert await store.get("key") in (old, new)
            assert set(await listed(store)) == {"key"}

    # -- behind the store's back

    async def test_what_was_put_lies_there_to_the_last_byte(
        self, store: Store, raw: RawAccess
    ) -> None:
        """The bytes are in place when ``put`` returns, not later."""
        for data in (b"first", b"", b"a longer second", self._big()):
            await store.put("a/key", data)
            assert await raw.read("a/key") == data
        await store.put("a", b"created", mode="create")
        assert await raw.read("a") == b"created"
        await store.delete("a")
        assert await raw.read("a") is None
        assert await raw.read("a/key") == self._big()

    async def test_others_mean_the_same_by_an_odd_key(self, store: Store, raw: RawAccess) -> None:
        """A store handles objects that it did not write: other machines share the place."""
        for key in ODD_KEYS:
            assert await store.get(key) is None
            await raw.write(key, b"theirs")
            with pytest.raises(PreconditionError):
                await store.put(key, b"ours", mode="create")
            await _assert_holds(store, key, b"theirs")
            await store.put(key, b"ours")
            assert await raw.read(key) == b"ours"
            await raw.remove(key)
            await _assert_holds(store, key, None)
            await store.put(key, b"again", mode="create")
            await store.delete(key)
            assert await raw.read(key) is None

    async def test_an_object_that_others_changed_is_given_as_it_is(
        self, store: Store, raw: RawAccess
    ) -> None:
        """Even a truncated one: the store remembers neither content nor size, and pads nothing."""
        data = bytes(i % 251 for i in range(10_050))
        for left in (0, 1, 5_000, 9_999, 10_050):
            await store.put("key", data[:10_000])
            await raw.write("key", data[:left])
            await _assert_holds(store, "key", data[:left])
            await store.put("key", data[:10_000])
            assert await raw.read("key") == data[:10_000]

    async def test_what_is_no_object_disturbs_nothing(self, store: Store, raw: RawAccess) -> None:
        """Leftovers of killed writers and of other programs are not listed, and break no call."""
        keys = {"a", "a/b", "dir/x", "x"}
        await put_all(store, sorted(keys)[:2])
        await raw.litter()
        await put_all(store, sorted(keys)[2:])
        for prefix in ("", "a", "a/", "d", "dir/"):
            assert set(await listed(store, prefix)) == {k for k in keys if k.startswith(prefix)}
        for key in keys:
            assert await store.get(key) == b"x"
            await store.delete(key)
        assert await listed(store) == {}

    # -- the store as a whole

    async def test_the_store_says_what_it_is(self, store: Store) -> None:
        """Its URL has no secret, the first create shows whether creating is atomic, and the store
        may be closed twice."""
        assert isinstance(store, Store)
        url = urlsplit(store.url)
        assert url.scheme
        assert (url.username, url.password) == (None, None)
        for secret in self.secrets:
            assert secret not in f"{store.url} {store!r}"
        assert await store.atomic_create() in (None, True, False)
        assert await listed(store) == {}
        await store.put("key", b"x", mode="create")
        first = await store.atomic_create()
        assert isinstance(first, bool)
        assert [*await listed(store)] == ["key"]
        await store.delete("key")
        await store.put("key", b"x", mode="create")
        assert await store.atomic_create() is first
        await store.aclose()
        await store.aclose()
