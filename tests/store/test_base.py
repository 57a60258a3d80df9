"""A wrapper handles every call in one method."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, get_args

import pytest

from s3cache.errors import ConfigError
from s3cache.stats import Verb
from s3cache.store import MemoryStore, NotAccepted, WrapperStore, check_key


class Noting(WrapperStore):
    """A wrapper that notes each call, makes it twice, and returns the second answer."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self.calls: list[tuple[str, str]] = []

    async def _around(self, verb: Verb, key: str, call: Callable[[], Awaitable[Any]]) -> Any:
        self.calls.append((verb, key))
        await call()
        return await call()


ILLEGAL_KEYS = {
    "empty": "",
    "leading slash": "/a",
    "trailing slash": "a/",
    "empty segment": "a//b",
    "dot": ".",
    "dots segment": "a/../b",
    "hidden": "a/.b",
    "newline at the end": "a\n",
    "nul": "a\0b",
    "space": "a b",
    "percent": "a%2fb",
    "plus": "a+b",
    "capital": "aB",
    "not ASCII": "é",
    "surrogate": "a\ud800",
    "long segment": "k" * 201,
    "too long": "/".join(["k" * 150] * 6),
}


@pytest.mark.parametrize("key", ILLEGAL_KEYS.values(), ids=ILLEGAL_KEYS.keys())
def test_no_store_accepts_an_illegal_key(key: str) -> None:
    """The contract tests try one illegal key on every store, with every verb."""
    with pytest.raises(ConfigError):
        check_key(key)


async def test_the_wrapper_sees_every_verb_with_its_key() -> None:
    store = Noting(MemoryStore())
    await store.put("key", b"abc")
    assert await store.get("key") == b"abc"
    assert await store.get("key", lambda size: size > 3) == NotAccepted(3)
    assert await store.get_range("key", 1, 1) == b"b"
    assert await store.head("key") is not None
    assert [info.key async for info in store.list("k")] == ["key"]
    assert await store.atomic_create()
    await store.delete("key")
    assert store.calls == [
        ("put", "key"),
        ("get", "key"),
        ("get", "key"),
        ("get_range", "key"),
        ("head", "key"),
        ("list", "k"),
        ("atomic_create", ""),
        ("delete", "key"),
    ]
    assert {verb for verb, _ in store.calls} == set(get_args(Verb))
