"""The doctor names faults of remotes, machines and settings with a fix, in bounded time."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from s3cache.errors import (
    AccessDeniedError,
    MissingContainerError,
    PermanentError,
    PreconditionError,
    TransientError,
)
from s3cache.insight import Check, examine
from s3cache.insight._doctor import (
    check_compiler,
    check_execution,
    check_local_dir,
    check_remote,
    check_settings,
    check_torch,
    check_trust,
)
from s3cache.settings import Settings
from s3cache.store import MemoryStore, Store, WrapperStore
from s3cache.trust import generate
from s3cache.util.threads import DeadlineExecutor
from tests.support.faulty import FaultyStore
from tests.support.hanging import dead_mount
from tests.support.marks import slow
from tests.support.stores import names
from tests.support.waiting import LONG_S

# -- the remote


class Odd(WrapperStore):
    """A store with other answers to some verbs: it raises an error, or calls a function."""

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


def named(checks: Iterable[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def checks_of(store: Store, **options: Any) -> dict[str, Check]:
    return named(check_remote(store, **options))


ALL = ["list", "get", "put", "conditional-put", "read-back", "clock", "latency", "delete"]
DENIED = AccessDeniedError("not allowed to")
MISSING = MissingContainerError("no bucket")


def test_a_good_store_is_ok_and_left_empty() -> None:
    store = MemoryStore()
    found = checks_of(store, is_shared_by_rights=False)
    assert [*found] == ALL
    assert {check.verdict for check in found.values()} == {"ok"}
    assert names(store) == []


SLOW = FaultyStore(MemoryStore(), {"slow": 1.0}, slow_s=0.02)


@pytest.mark.parametrize(
    ("store", "name", "verdict", "found", "fix", "options"),
    [
        (Odd(list=DENIED), "list", "fault", "not allowed", "s3cache-policy.json", {}),
        (Odd(get=DENIED), "get", "fault", "not allowed", "credentials", {}),
        (Odd(put=DENIED), "put", "fault", "not allowed", "s3cache-policy.json", {}),
        (Odd(create=DENIED), "conditional-put", "fault", "not allowed", "credentials", {}),
        (Odd(head=DENIED), "clock", "fault", "not allowed", "credentials", {}),
        (Odd(delete=DENIED), "delete", "ok", "as it should be", "", {}),
        (Odd(delete=PermanentError("no")), "delete", "fault", "no", "configuration", {}),
        (MemoryStore(), "delete", "warning", "can empty the cache", "s3:DeleteObject", {}),
        (Odd(list=MISSING), "list", "fault", "no bucket", "make", {}),
        (Odd(list=TransientError("no route")), "list", "fault", "no route", "network", {}),
        (Odd(create=None), "conditional-put", "fault", "was overwritten", "another server", {}),
        (Odd(atomic_create=False), "conditional-put", "warning", "ignores If-", "newer server", {}),
        (Odd(get=b"else"), "read-back", "fault", "differs from the written", "in between", {}),
        (MemoryStore(), "clock", "ok", "agrees", "", {"now": time.time}),
        (MemoryStore(), "clock", "warning", "ahead", "NTP", {"now": lambda: time.time() + 120}),
        (MemoryStore(), "clock", "fault", "behind", "NTP", {"now": lambda: time.time() - 1000}),
        (SLOW, "latency", "warning", "ms for a small request", "region", {"slow_s": 0.01}),
        (Odd(put=PreconditionError("was tried")), "put", "skipped", "", "", {"may_write": False}),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, Store) else None,
)
def test_each_fault_is_named(
    store: Store, name: str, verdict: str, found: str, fix: str, options: dict[str, Any]
) -> None:
    check = checks_of(store, **options)[name]
    assert check.verdict == verdict
    assert found in check.found
    assert fix in check.fix


def test_checks_end_at_a_fault_that_explains_all_later_ones() -> None:
    assert [*checks_of(Odd(list=MISSING))] == ["list"]
    assert [*checks_of(Odd(put=DENIED))] == ["list", "get", "put"]
    assert [*checks_of(Odd(list=DENIED))] == ALL


class OnlyEntries(Odd):
    """A store whose policy covers the names of entries, and nothing else below the prefix."""

    async def _around(self, verb: str, key: str, call: Callable[[], Awaitable[Any]]) -> Any:
        if verb != "atomic_create" and not key.startswith("v1/"):
            raise DENIED
        return await call()


def test_a_policy_for_entries_alone_is_enough() -> None:
    assert {check.verdict for check in checks_of(OnlyEntries()).values()} == {"ok", "warning"}


def test_each_request_has_a_deadline() -> None:
    found = checks_of(Odd(get=asyncio.Event().wait), timeout_s=0.05)
    assert found["get"].verdict == found["read-back"].verdict == "fault"
    assert "no answer within 0.05 s" in found["get"].found


# -- credentials, and all checks together

URL = "s3://bucket/p?endpoint_url=http://127.0.0.1:9&region=us-east-1"


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("S3CACHE_LOCAL", "0")
    return tmp_path / "config"


def examined(url: str | None = URL, timeout_s: float = 5.0) -> dict[str, Check]:
    return named(examine(url, programs=False, timeout_s=timeout_s))


@pytest.mark.parametrize(
    ("text", "timeout_s", "found"),
    [
        ("", LONG_S, "were not found"),
        ("[default]\ncredential_process = sleep 600\n", 1.0, "no answer within 1 s"),
        ("[default]\ncredential_process = false\n", LONG_S, ""),
    ],
    ids=["none", "hangs", "fails"],
)
def test_each_fault_of_credentials(config: Path, text: str, timeout_s: float, found: str) -> None:
    config.write_text(text)
    checks = examined(timeout_s=timeout_s)
    assert checks["credentials"].verdict == "fault"
    assert found in checks["credentials"].found
    assert "AWS_PROFILE" in checks["credentials"].fix
    assert "list" not in checks  # missing credentials explain its fault
    assert "trust" in checks  # trust needs no credentials


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


# -- settings and trust


OURS, OTHER = generate("ours"), generate("other")
PUBLIC, SECRET = OURS.public_text(), OURS.secret_text()


def settings(url: str | None = None, **options: Any) -> list[Check]:
    return [*check_settings(Settings.load(url, **options)[0], url)]


def trust(**options: Any) -> dict[str, Check]:
    return named(check_trust(Settings.load(**options)[0]))


def test_the_origin_of_each_setting_is_shown_without_secrets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("S3CACHE_LOOKUP_TIMEOUT_S", "5")
    monkeypatch.setenv("S3CACHE_SIGNING_KEY", "/a/secret/place")
    first, second = settings("s3://bucket/prefix")
    assert first.verdict == second.verdict == "ok"
    assert "url from --url" in first.found
    assert "lookup_timeout_s=5.0 from S3CACHE_LOOKUP_TIMEOUT_S" in first.found
    assert "signing_key from S3CACHE_SIGNING_KEY" in first.found
    assert "secret" not in first.found
    assert "bucket/prefix" in second.found


def test_a_misspelt_variable_a_missing_remote_and_mode_off_are_warnings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("S3CACHE_LOOKUP_TIMEOUT", "5")
    _, misspelt, mode, remote = settings(mode="off")
    assert misspelt.verdict == mode.verdict == remote.verdict == "warning"
    assert "S3CACHE_LOOKUP_TIMEOUT is not known" in misspelt.found
    assert "S3CACHE_LOOKUP_TIMEOUT_S" in misspelt.fix
    assert (mode.name, remote.name, remote.fix) == ("mode", "remote", "set S3CACHE_URL")


def test_a_bad_url_is_a_fault_that_shows_no_password() -> None:
    for url in ("ftp://bucket", "s3://AKIA:hunter2@bucket", "s3://b?secret_key=hunter2", "s3:///x"):
        check = settings(url)[-1]
        assert (check.name, check.verdict) == ("remote", "fault")
        assert check.fix
        assert "hunter2" not in str(check)


@pytest.mark.parametrize(
    ("options", "name", "verdict", "found"),
    [
        ({}, "trust", "warning", "no key is trusted"),
        ({"trusted_keys": PUBLIC, "signing_key": SECRET}, "trust", "ok", "require: ours for main"),
        ({"trusted_keys": PUBLIC, "signing_key": SECRET}, "signing", "ok", "ours for main"),
        ({"trusted_keys": PUBLIC}, "signing", "warning", "not signed"),
        ({"trusted_keys": OTHER.public_text(), "signing_key": SECRET}, "signing", "fault",
         "not trusted"),
        ({"trusted_keys": f"pulls={PUBLIC}", "signing_key": SECRET}, "signing", "fault",
         "other-audience"),
        ({"trusted_keys": "nonsense"}, "trust", "fault", "trusted key"),
        ({"trust": "require"}, "trust", "fault", "no key is trusted"),
        ({"signing_key": "/nowhere/ci.key"}, "trust", "fault", "cannot be opened"),
    ],
)  # fmt: skip
def test_trust(options: dict[str, Any], name: str, verdict: str, found: str) -> None:
    check = trust(**options)[name]
    assert (check.verdict, check.fix == "") == (verdict, verdict == "ok")
    assert found in check.found
    assert [*trust(trusted_keys=PUBLIC, mode="read-only")] == ["trust"]  # a reader needs no key


# -- machine


def local(path: Path, **more: Any) -> Check:
    return named(check_local_dir(Settings(local_dir=str(path), **more)))["local-directory"]


def test_a_directory_is_ok_if_its_disk_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that hangs is a fault in bounded time."""
    checks = named(check_local_dir(Settings(local_dir=str(tmp_path / "cache"))))
    assert checks["local-directory"].verdict == "ok"
    assert checks["space"].verdict in ("ok", "warning")
    assert local(tmp_path, local=False).verdict == "skipped"
    monkeypatch.setattr(DeadlineExecutor, "limit_s", 0.3)
    with dead_mount(tmp_path):
        check = local(tmp_path)
        assert check.verdict == "fault"
        assert "a directory that works" in check.fix


def test_little_space_on_the_disk_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for blocks, inodes, found in ((1 << 8, 1 << 20, "1 MiB"), (1 << 30, 5, "5 inodes")):
        disk = SimpleNamespace(f_bavail=blocks, f_frsize=4096, f_files=1 << 20, f_favail=inodes)
        monkeypatch.setattr(os, "statvfs", lambda _, disk=disk: disk)
        space = named(check_local_dir(Settings(local_dir=str(tmp_path))))["space"]
        assert space.verdict == "warning"
        assert f"{found} are free" in space.found


def test_a_system_that_cannot_load_code_is_a_fault(tmp_path: Path) -> None:
    sysctl = tmp_path / "memfd_noexec"
    assert check_execution(sysctl).verdict == "ok"  # an older Linux
    for text, verdict in (("1\n", "ok"), ("2\n", "fault")):
        sysctl.write_text(text)
        assert check_execution(sysctl).verdict == verdict


# -- programs


def prints(text: str, code: int = 0) -> list[str]:
    return [sys.executable, "-c", f"print({text!r}); raise SystemExit({code})"]


@pytest.mark.parametrize(
    ("command", "verdict", "found"),
    [
        (prints("torch 2.13.0, supported: 9 names, 0 not as declared"), "ok", "2.13.0"),
        (prints("torch 1.13, not supported: 9 names, 3 not as declared", 1), "fault", "not supp"),
        (prints("MISSING all torch._x:y\ntorch 2.13, supported: 9 names, 1 not as declared", 1),
         "fault", "torch._x:y"),
        ([sys.executable, "-c", "import torch_that_is_not_there"], "fault", "No module named"),
        (["/nowhere/python"], "fault", "No such file"),
        ([sys.executable, "-c", "import time; time.sleep(600)"], "fault", "within 0.5 s"),
    ],
)  # fmt: skip
def test_each_fault_of_torch(command: list[str], verdict: str, found: str) -> None:
    check = check_torch(0.5 if "sleep" in command[-1] else LONG_S, command)
    assert (check.verdict, check.fix == "") == (verdict, verdict == "ok")
    assert found in check.found


@slow
def test_torch_is_ok_if_the_environment_enables_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The doctor does not report our own hooks in torch as a fault."""
    monkeypatch.setenv("S3CACHE_URL", f"file://{tmp_path}")
    check = check_torch()
    assert (check.verdict, check.fix) == ("ok", "")


@pytest.mark.parametrize(
    ("script", "verdict", "found"),
    [
        (None, "warning", "hits do not need it"),
        ("echo g++ of tests 1.0", "ok", "g++ of tests 1.0"),
        ("exit 3", "fault", "exit code 3"),
        ("exec /bin/sleep 600", "fault", "no answer within 0.5 s"),
    ],
)
def test_each_fault_of_the_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str | None, verdict: str, found: str
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    if script is not None:
        (tmp_path / "g++").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "g++").chmod(0o700)
    check = check_compiler(0.5 if script and "sleep" in script else LONG_S)
    assert check.verdict == verdict
    assert found in check.found
    monkeypatch.setenv("CXX", "no-such-compiler")
    check = check_compiler()
    assert "no-such-compiler" in check.found
