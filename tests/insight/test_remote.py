"""Each fault of a remote is made here, and named with a fix."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest

from s3cache.errors import (
    AccessDeniedError,
    MissingContainerError,
    PermanentError,
    PreconditionError,
    StoreError,
    TransientError,
)
from s3cache.insight import Check, check_remote
from s3cache.store import LatencyStore, MemoryStore, Store, WrapperStore

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class Bad(WrapperStore):
    """Raises ``error`` from one verb."""

    def __init__(self, verb: str, error: StoreError) -> None:
        super().__init__(MemoryStore())
        self._verb, self._error = verb, error

    async def _around(self, verb: str, key: str, call: Callable[[], Awaitable[Any]]) -> Any:
        if verb == self._verb:
            raise self._error
        return await call()

    async def put(self, key: str, data: Any, *, mode: Any = "overwrite", **more: Any) -> None:
        if self._verb == "create" and mode == "create":
            raise self._error
        await super().put(key, data, mode=mode, **more)


class Overwriting(MemoryStore):
    """Takes ``create`` for ``overwrite``."""

    async def put(self, key: str, data: Any, *, mode: Any = "overwrite", **more: Any) -> None:
        await super().put(key, data)


class Careless(MemoryStore):
    """Looks before it creates, and no more than that."""

    async def atomic_create(self) -> bool:
        return False


class Garbling(MemoryStore):
    async def get(self, key: str, admit: Any = None) -> Any:
        found = await super().get(key, admit)
        return None if found is None else b"something else"


class Hanging(MemoryStore):
    async def get(self, key: str, admit: Any = None) -> Any:
        await asyncio.Event().wait()


def examined(store: Store, **how: Any) -> dict[str, Check]:
    async def run() -> dict[str, Check]:
        return {check.name: check async for check in check_remote(store, **how)}

    return asyncio.run(run())


def test_all_is_well_where_all_is_well() -> None:
    found = examined(MemoryStore(), is_shared_by_rights=False)
    assert [*found] == [
        *("list", "get", "put", "conditional put", "read back", "clock", "latency", "delete")
    ]
    assert {check.verdict for check in found.values()} == {"ok"}


def test_nothing_of_ours_stays() -> None:
    async def run() -> list[str]:
        store = MemoryStore()
        async for _ in check_remote(store):
            pass
        return [info.key async for info in store.list()]

    assert asyncio.run(run()) == []


DENIED = AccessDeniedError("not allowed to")


@pytest.mark.parametrize(
    ("store", "name", "verdict", "said", "fix"),
    [
        (Bad("list", DENIED), "list", "fault", "not allowed", "s3cache-policy.json"),
        (Bad("get", DENIED), "get", "fault", "not allowed", "credentials"),
        (Bad("put", DENIED), "put", "fault", "not allowed", "s3cache-policy.json"),
        (Bad("create", DENIED), "conditional put", "fault", "not allowed", "credentials"),
        (Bad("head", DENIED), "clock", "fault", "not allowed", "credentials"),
        (Bad("delete", DENIED), "delete", "ok", "as it should be", ""),
        (Bad("delete", PermanentError("no")), "delete", "fault", "no", "configuration"),
        (MemoryStore(), "delete", "warning", "can empty the cache", "s3:DeleteObject"),
        (Bad("list", MissingContainerError("no bucket")), "list", "fault", "no bucket", "make"),
        (Bad("list", TransientError("no route")), "list", "fault", "no route", "network"),
        (Overwriting(), "conditional put", "fault", "was overwritten", "another server"),
        (Careless(), "conditional put", "warning", "ignores If-None-Match", "newer server"),
        (Garbling(), "read back", "fault", "not what was written", "in between"),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, Store) else None,
)
def test_each_fault_is_named(store: Store, name: str, verdict: str, said: str, fix: str) -> None:
    check = examined(store)[name]
    assert check.verdict == verdict
    assert said in check.found
    assert fix in check.fix


def test_what_explains_all_else_comes_alone() -> None:
    assert [*examined(Bad("list", MissingContainerError("no bucket")))] == ["list"]
    assert [*examined(Bad("put", DENIED))] == ["list", "get", "put"]
    # Without the right to list, the others are still worth a try.
    assert "delete" in examined(Bad("list", DENIED))


def test_no_request_is_waited_for_without_bound() -> None:
    found = examined(Hanging(), timeout_s=0.05)
    assert found["get"].verdict == found["read back"].verdict == "fault"
    assert "no answer within 0.05 s" in found["get"].found


def test_nothing_is_written_where_nothing_may_be() -> None:
    found = examined(Bad("put", PreconditionError("was tried")), may_write=False)
    assert [(check.name, check.verdict) for check in found.values()] == [
        ("list", "ok"),
        ("get", "ok"),
        ("put", "skipped"),
    ]


@pytest.mark.parametrize(
    ("ahead_s", "verdict", "said"),
    [
        (0.0, "ok", "agrees"),
        (120.0, "warning", "ahead"),
        (-120.0, "warning", "behind"),
        (1000.0, "fault", "S3 refuses requests"),
        (-1000.0, "fault", "behind"),
    ],
)
def test_a_clock_that_is_wrong(ahead_s: float, verdict: str, said: str) -> None:
    check = examined(MemoryStore(), now=lambda: time.time() + ahead_s)["clock"]
    assert check.verdict == verdict
    assert said in check.found
    assert verdict == "ok" or "NTP" in check.fix


def test_a_store_that_is_far_away() -> None:
    check = examined(LatencyStore(MemoryStore(), 0.02), slow_s=0.01)["latency"]
    assert (check.verdict, "region" in check.fix) == ("warning", True)
