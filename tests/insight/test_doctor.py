"""Each fault of a remote and of its credentials is named with a fix, within bounded time."""

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
    TransientError,
)
from s3cache.insight import Check, examine
from s3cache.insight._doctor import check_remote
from s3cache.store import MemoryStore, Store, WrapperStore
from s3cache.testing import FaultRates, FaultyStore

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

# -- the remote


class Odd(WrapperStore):
    """Answers some verbs in its own way: an error is raised, and a function is called."""

    def __init__(self, **answers: Any) -> None:
        super().__init__(MemoryStore())
        self._answers = answers

    async def _around(self, verb: str, key: str, call: Callable[[], Awaitable[Any]]) -> Any:
        answer = self._answers.get(verb, call)
        if isinstance(answer, Exception):
            raise answer
        return await answer() if callable(answer) else answer

    async def put(self, key: str, data: Any, *, mode: Any = "overwrite", **more: Any) -> None:
        if mode == "create" and "create" in self._answers:
            await self._around("create", key, super().atomic_create)
        else:
            await super().put(key, data, mode=mode, **more)


def checks_of(store: Store, **how: Any) -> dict[str, Check]:
    return {check.name: check for check in check_remote(store, **how)}


READING = ["list", "get"]
ALL = [*READING, "put", "conditional-put", "read-back", "clock", "latency", "delete"]
DENIED = AccessDeniedError("not allowed to")
MISSING = MissingContainerError("no bucket")


def test_a_sound_store_is_ok_and_left_empty() -> None:
    store = MemoryStore()
    found = checks_of(store, is_shared_by_rights=False)
    assert [*found] == ALL
    assert {check.verdict for check in found.values()} == {"ok"}

    async def left() -> list[str]:
        return [info.key async for info in store.list()]

    assert asyncio.run(left()) == []


@pytest.mark.parametrize(
    ("store", "name", "verdict", "found", "fix"),
    [
        (Odd(list=DENIED), "list", "fault", "not allowed", "s3cache-policy.json"),
        (Odd(get=DENIED), "get", "fault", "not allowed", "credentials"),
        (Odd(put=DENIED), "put", "fault", "not allowed", "s3cache-policy.json"),
        (Odd(create=DENIED), "conditional-put", "fault", "not allowed", "credentials"),
        (Odd(head=DENIED), "clock", "fault", "not allowed", "credentials"),
        (Odd(delete=DENIED), "delete", "ok", "as it should be", ""),
        (Odd(delete=PermanentError("no")), "delete", "fault", "no", "configuration"),
        (MemoryStore(), "delete", "warning", "can empty the cache", "s3:DeleteObject"),
        (Odd(list=MISSING), "list", "fault", "no bucket", "make"),
        (Odd(list=TransientError("no route")), "list", "fault", "no route", "network"),
        (Odd(create=None), "conditional-put", "fault", "was overwritten", "another server"),
        (Odd(atomic_create=False), "conditional-put", "warning", "ignores If-", "newer server"),
        (Odd(get=b"something else"), "read-back", "fault", "not what was written", "in between"),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, Store) else None,
)
def test_each_fault_is_named(store: Store, name: str, verdict: str, found: str, fix: str) -> None:
    check = checks_of(store)[name]
    assert check.verdict == verdict
    assert found in check.found
    assert fix in check.fix


@pytest.mark.parametrize(
    ("store", "names"),
    [
        (Odd(list=MISSING), ["list"]),
        (Odd(put=DENIED), [*READING, "put"]),
        (Odd(list=DENIED), ALL),
    ],
)
def test_checks_end_where_a_fault_explains_the_rest(store: Store, names: list[str]) -> None:
    assert [*checks_of(store)] == names


def test_each_request_has_a_deadline() -> None:
    found = checks_of(Odd(get=asyncio.Event().wait), timeout_s=0.05)
    assert found["get"].verdict == found["read-back"].verdict == "fault"
    assert "no answer within 0.05 s" in found["get"].found


def test_nothing_is_written_without_may_write() -> None:
    found = checks_of(Odd(put=PreconditionError("was tried")), may_write=False)
    verdicts = [(check.name, check.verdict) for check in found.values()]
    assert verdicts == [("list", "ok"), ("get", "ok"), ("put", "skipped")]


@pytest.mark.parametrize(
    ("ahead_s", "verdict", "found"),
    [(0.0, "ok", "agrees"), (120.0, "warning", "ahead"), (-1000.0, "fault", "behind")],
)
def test_a_wrong_clock_is_noticed(ahead_s: float, verdict: str, found: str) -> None:
    check = checks_of(MemoryStore(), now=lambda: time.time() + ahead_s)["clock"]
    assert check.verdict == verdict
    assert found in check.found
    assert verdict == "ok" or "NTP" in check.fix


def test_a_slow_store_is_a_warning() -> None:
    check = checks_of(FaultyStore(MemoryStore(), FaultRates(slow=1.0), slow_s=0.02), slow_s=0.01)[
        "latency"
    ]
    assert (check.verdict, "region" in check.fix) == ("warning", True)


# -- credentials, and all checks together

URL = "s3://bucket/p?endpoint_url=http://127.0.0.1:9&region=us-east-1"


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("S3CACHE_LOCAL", "0")
    return tmp_path / "config"


def examined(url: str | None = URL, timeout_s: float = 5.0) -> dict[str, Check]:
    checks = examine(url, programs=False, timeout_s=timeout_s)
    return {check.name: check for check in checks}


@pytest.mark.parametrize(
    ("text", "timeout_s", "found"),
    [
        ("", 5.0, "there are none"),
        ("[default]\ncredential_process = sleep 600\n", 1.0, "no answer within 1 s"),
        ("[default]\ncredential_process = false\n", 5.0, ""),
    ],
    ids=["none", "hangs", "fails"],
)
def test_each_fault_of_credentials(config: Path, text: str, timeout_s: float, found: str) -> None:
    config.write_text(text)
    checks = examined(timeout_s=timeout_s)
    assert checks["credentials"].verdict == "fault"
    assert found in checks["credentials"].found
    assert "AWS_PROFILE" in checks["credentials"].fix
    assert "list" not in checks  # which they explain
    assert "trust" in checks  # which they do not


@pytest.mark.parametrize(
    ("option", "origin"), [("anonymous=true", "anonymous"), ("profile=mine", "config")]
)
def test_the_origin_of_credentials_is_shown(config: Path, option: str, origin: str) -> None:
    keys = "aws_access_key_id = AKIA\naws_secret_access_key = hunter2"
    config.write_text(f"[profile mine]\n{keys}\n")
    found = examined(f"{URL}&{option}")
    assert found["credentials"].verdict == "ok"
    assert origin in found["credentials"].found
    assert "hunter2" not in str(found)
    assert found["list"].verdict == "fault"  # there is no server
    assert "network" in found["list"].fix


@pytest.mark.usefixtures("config")
def test_a_reader_writes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("S3CACHE_MODE", "read-only")
    assert examined(f"file://{tmp_path}/remote")["put"].verdict == "skipped"
