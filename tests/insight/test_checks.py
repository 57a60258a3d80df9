"""Each fault of a machine, its settings, torch and the compiler, is named with a fix."""

from __future__ import annotations

import shutil
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from s3cache.insight._doctor import (
    Check,
    check_compiler,
    check_execution,
    check_local_dir,
    check_settings,
    check_torch,
    check_trust,
)
from s3cache.settings import Settings
from s3cache.trust import generate
from s3cache.util.deadline import DeadlineExecutor
from tests.support.hanging import dead_mount
from tests.support.waiting import LONG_S

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

# -- settings and trust


OURS, OTHER = generate("ours"), generate("other")
PUBLIC, SECRET = OURS.public_text(), OURS.secret_text()


def settings(url: str | None = None, **options: Any) -> list[Check]:
    return [*check_settings(Settings.load(url, **options)[0], url)]


def named(checks: Iterable[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def trust(**options: Any) -> dict[str, Check]:
    return named(check_trust(Settings.load(**options)[0]))


def test_the_origin_of_each_setting_is_shown_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S3CACHE_LOOKUP_TIMEOUT_S", "5")
    monkeypatch.setenv("S3CACHE_SIGNING_KEY", "/a/secret/place")
    first, second = settings("s3://bucket/prefix")
    assert first.verdict == second.verdict == "ok"
    assert "url from --url" in first.found
    assert "lookup_timeout_s=5.0 from S3CACHE_LOOKUP_TIMEOUT_S" in first.found
    assert "signing_key from S3CACHE_SIGNING_KEY" in first.found
    assert "secret" not in first.found
    assert "bucket/prefix" in second.found


def test_a_misspelt_variable_no_remote_and_mode_off_are_warnings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("S3CACHE_LOOKUP_TIMEOUT", "5")
    _, misspelt, mode, remote = settings(mode="off")
    assert misspelt.verdict == mode.verdict == remote.verdict == "warning"
    assert "S3CACHE_LOOKUP_TIMEOUT is not known" in misspelt.found
    assert "S3CACHE_LOOKUP_TIMEOUT_S" in misspelt.fix
    assert (mode.name, remote.name, remote.fix) == ("mode", "remote", "set S3CACHE_URL")


@pytest.mark.parametrize(
    "url", ["ftp://bucket", "s3://AKIA:hunter2@bucket", "s3://b?secret_key=hunter2", "s3:///x"]
)
def test_a_bad_url_is_a_fault_that_shows_no_password(url: str) -> None:
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


def test_a_reader_needs_no_key() -> None:
    assert [*trust(trusted_keys=PUBLIC, mode="read-only")] == ["trust"]


# -- machine


def local(path: Path, **more: Any) -> Check:
    return named(check_local_dir(Settings(local_dir=str(path), **more)))["local-directory"]


def test_a_private_directory_is_well(tmp_path: Path) -> None:
    found = named(check_local_dir(Settings(local_dir=str(tmp_path / "cache"))))
    assert found["local-directory"].verdict == "ok"
    assert found["space"].verdict in ("ok", "warning")
    assert local(tmp_path, local=False).verdict == "skipped"


def test_a_directory_that_others_can_write_to_is_a_fault(tmp_path: Path) -> None:
    """As is each other one that a local tier refuses (tests/trust/test_directories.py)."""
    tmp_path.chmod(0o777)
    check = local(tmp_path)
    assert (check.verdict, check.code) == ("fault", "ConfigError")
    assert f"run: chmod go-w {tmp_path}" in check.fix


def test_a_disk_that_hangs_is_a_fault_in_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeadlineExecutor, "limit_s", 0.3)
    with dead_mount(tmp_path):
        check = local(tmp_path)
        assert check.verdict == "fault"
        assert "a directory that works" in check.fix


def test_little_room_on_the_disk_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    space = named(check_local_dir(Settings(local_dir=str(tmp_path))))["space"]
    assert (space.verdict, "make room" in space.fix) == ("warning", True)


@pytest.mark.parametrize(("text", "verdict"), [("1\n", "ok"), ("2\n", "fault"), (None, "ok")])
def test_a_system_that_loads_no_code_is_a_fault(
    tmp_path: Path, text: str | None, verdict: str
) -> None:
    sysctl = tmp_path / "memfd_noexec"
    if text is not None:
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


@pytest.mark.timeout(300)
def test_torch_is_well_where_the_environment_turns_the_cache_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Our own hooks in torch are no fault of torch's."""
    monkeypatch.setenv("S3CACHE_URL", f"file://{tmp_path}")
    check = check_torch()
    assert (check.verdict, check.fix) == ("ok", "")


@pytest.mark.parametrize(
    ("script", "verdict", "found"),
    [
        (None, "warning", "hits need none"),
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
