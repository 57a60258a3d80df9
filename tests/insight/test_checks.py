"""Each fault of a machine, its settings, torch and the compiler, is named with a fix."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import pytest

from s3cache.insight import (
    Check,
    check_compiler,
    check_disk,
    check_local_dir,
    check_settings,
    check_torch,
    check_trust,
)
from s3cache.insight._checks import check_cpu, check_execution
from s3cache.settings import Settings
from s3cache.trust import generate
from tests.support.density import dense
from tests.support.hanging import dead_mount

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

# -- setup


OURS, OTHER = generate("ours"), generate("other")


def settings(url: str | None = None, **options: Any) -> list[Check]:
    return [*check_settings(Settings.load(url, **options)[0], url)]


def trust(**options: Any) -> list[Check]:
    return [*check_trust(Settings.load(**options)[0])]


def test_where_each_setting_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S3CACHE_LOOKUP_TIMEOUT_S", "5")
    monkeypatch.setenv("S3CACHE_SIGNING_KEY", "/a/secret/place")
    first, second = settings("s3://bucket/prefix")
    assert first.verdict == second.verdict == "ok"
    assert "url from --url" in first.found
    assert "lookup_timeout_s=5.0 from S3CACHE_LOOKUP_TIMEOUT_S" in first.found
    assert "signing_key from S3CACHE_SIGNING_KEY" in first.found
    assert "secret" not in first.found
    assert "bucket/prefix" in second.found


def test_a_variable_that_is_misspelt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S3CACHE_LOOKUP_TIMEOUT", "5")
    check = settings("memory://x")[1]
    assert check.verdict == "warning"
    assert "S3CACHE_LOOKUP_TIMEOUT is not known" in check.found
    assert "S3CACHE_LOOKUP_TIMEOUT_S" in check.fix


def test_no_remote_and_no_use() -> None:
    checks = {check.name: check for check in settings(mode="off")}
    assert checks["remote"].verdict == checks["mode"].verdict == "warning"
    assert checks["remote"].fix == "set S3CACHE_URL"


@pytest.mark.parametrize(
    "url", ["ftp://bucket", "s3://AKIA:hunter2@bucket", "s3://b?secret_key=hunter2", "s3:///x"]
)
def test_a_url_that_cannot_be_used(url: str) -> None:
    check = settings(url)[-1]
    assert (check.name, check.verdict) == ("remote", "fault")
    assert check.fix
    assert "hunter2" not in str(check)


def test_nobody_is_trusted() -> None:
    [check] = trust()
    assert (check.verdict, "keygen" in check.fix) == ("warning", True)


def test_what_is_saved_is_signed_by_somebody_who_is_trusted() -> None:
    public = OURS.public_text()
    level, signing = trust(trusted_keys=public, signing_key=OURS.secret_text())
    assert (level.verdict, signing.verdict) == ("ok", "ok")
    assert "require: ours for main" in level.found


@pytest.mark.parametrize(
    ("options", "name", "verdict", "said"),
    [
        ({"trusted_keys": OURS.public_text()}, "signing", "warning", "not signed"),
        (
            {"trusted_keys": OTHER.public_text(), "signing_key": OURS.secret_text()},
            "signing",
            "fault",
            "not trusted",
        ),
        (
            {"trusted_keys": f"pulls={OURS.public_text()}", "signing_key": OURS.secret_text()},
            "signing",
            "fault",
            "not trusted for that",
        ),
        ({"trusted_keys": "nonsense"}, "trust", "fault", "trusted key"),
        ({"trust": "require"}, "trust", "fault", "no key is trusted"),
        ({"signing_key": "/nowhere/ci.key"}, "trust", "fault", "cannot be opened"),
    ],
)
def test_each_fault_of_trust(options: dict[str, Any], name: str, verdict: str, said: str) -> None:
    (check,) = (check for check in trust(**options) if check.name == name)
    assert check.verdict == verdict
    assert said in check.found
    assert check.fix


def test_a_key_that_others_may_read(tmp_path: Path) -> None:
    path = tmp_path / "ci.key"
    path.write_text(OURS.secret_text())
    path.chmod(0o644)
    [check] = trust(signing_key=str(path))
    assert (check.verdict, check.fix) == ("fault", f"chmod 600 {path}")


def test_who_only_reads_need_not_sign() -> None:
    assert [check.name for check in trust(trusted_keys=OURS.public_text(), mode="read-only")] == [
        "trust"
    ]


# -- machine


def named(checks: Iterable[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def local(path: Path, **more: Any) -> Check:
    return named(check_local_dir(Settings(local_dir=str(path), **more)))["local directory"]


def disk(**changes: int) -> Callable[[str], os.statvfs_result]:
    about = {"f_bavail": 1 << 30, "f_frsize": 4096, "f_files": 1 << 20, "f_favail": 1 << 20}
    about = {**about, "f_flag": 0, **changes}
    names = "f_bsize f_frsize f_blocks f_bfree f_bavail f_files f_ffree f_favail f_flag f_namemax"
    result = os.statvfs_result([about.get(name, 0) for name in names.split()])
    return lambda _: result


def test_a_directory_of_ours_is_well(tmp_path: Path) -> None:
    found = named(check_local_dir(Settings(local_dir=str(tmp_path / "cache"))))
    assert found["local directory"].verdict == "ok"
    assert {"space", "inodes"} <= set(found)


def test_a_directory_that_others_may_write(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    path.mkdir()
    path.chmod(0o777)
    check = local(path)
    assert (check.verdict, check.fix) == ("fault", f"run: chmod go-w {path}")


def test_a_directory_that_others_may_rename(tmp_path: Path) -> None:
    above = tmp_path / "above"
    above.mkdir()
    above.chmod(0o777)
    check = local(above / "cache")
    assert check.verdict == "fault"
    assert "anybody may rename it" in check.found
    assert f"chmod +t {above}" in check.fix


def test_a_link_and_a_file(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    (tmp_path / "file").write_text("")
    assert "is a symbolic link" in local(tmp_path / "link").found
    assert "is no directory" in local(tmp_path / "file").found
    below = local(tmp_path / "file" / "cache")
    assert (below.verdict, "local_dir" in below.fix) == ("fault", True)


def test_a_directory_of_somebody_else(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    path = tmp_path / "cache"
    path.mkdir(mode=0o700)
    os.chown(path, 12345, 12345)
    check = local(path)
    assert check.verdict == "fault"
    assert "belongs to user id 12345" in check.found


@dense
def test_a_disk_that_hangs(tmp_path: Path) -> None:
    """It takes seconds, and no more."""
    with dead_mount(tmp_path):
        check = local(tmp_path)
        assert check.verdict == "fault"
        assert "hangs" in check.found
        assert "a disk that works" in check.fix


def test_no_local_tier_is_no_fault(tmp_path: Path) -> None:
    assert local(tmp_path, local=False).verdict == "skipped"


@pytest.mark.parametrize(
    ("changes", "name", "verdict"),
    [
        ({}, "space", "ok"),
        ({"f_bavail": 1000}, "space", "warning"),
        ({}, "inodes", "ok"),
        ({"f_favail": 9}, "inodes", "warning"),
        ({"f_favail": 0, "f_files": 0}, "inodes", "ok"),
    ],
)
def test_room_on_the_disk(tmp_path: Path, changes: dict[str, int], name: str, verdict: str) -> None:
    check = named(check_disk(str(tmp_path), 10 << 30, disk(**changes)))[name]
    assert check.verdict == verdict
    assert (verdict == "ok") == (check.fix == "")


def test_a_disk_that_says_nothing(tmp_path: Path) -> None:
    def fails(_: str) -> os.statvfs_result:
        raise OSError(5, "Input/output error")

    check = named(check_disk(str(tmp_path), 1, fails))["disk"]
    assert (check.verdict, "Input/output error" in check.found) == ("fault", True)


def test_code_that_may_not_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    sysctl = tmp_path / "memfd_noexec"
    for text, verdict in (("0\n", "ok"), ("1\n", "ok"), ("2\n", "fault")):
        sysctl.write_text(text)
        found = named(check_execution(disk(), str(sysctl)))
        assert found["execution"].verdict == verdict
        assert "torch's directory" not in found
    found = named(check_execution(disk(f_flag=os.ST_NOEXEC), str(tmp_path / "none")))
    assert found["execution"].verdict == "ok"
    assert found["torch's directory"].verdict == "fault"
    assert "noexec" in found["torch's directory"].found


@pytest.mark.parametrize(
    ("text", "verdict", "said"),
    [
        ("flags\t\t: fpu sse avx2 avx512f\n", "ok", "avx512f avx2"),
        ("Features\t: fp asimd sve\n", "ok", "sve asimd"),
        ("flags : fpu sse\n", "warning", "without vector"),
        ("", "ok", ""),
    ],
)
def test_the_instructions_of_the_cpu(tmp_path: Path, text: str, verdict: str, said: str) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(text)
    [check] = check_cpu(str(path))
    assert check.verdict == verdict
    assert said in check.found


# -- program


def says(text: str, code: int = 0) -> list[str]:
    return [sys.executable, "-c", f"print({text!r}); raise SystemExit({code})"]


@pytest.mark.parametrize(
    ("command", "verdict", "said"),
    [
        (says("torch 2.13.0, supported: 9 names, 0 not as declared"), "ok", "2.13.0"),
        (says("torch 1.13, not supported: 9 names, 3 not as declared", 1), "fault", "not supp"),
        (
            says("MISSING all torch._x:y\ntorch 2.13, supported: 9 names, 1 not as declared", 1),
            "fault",
            "torch._x:y",
        ),
        ([sys.executable, "-c", "import torch_that_is_not_there"], "fault", "No module named"),
        (["/nowhere/python"], "fault", "No such file"),
    ],
)
def test_each_fault_of_torch(command: list[str], verdict: str, said: str) -> None:
    [check] = check_torch(command=command)
    assert check.verdict == verdict
    assert said in check.found
    assert (verdict == "ok") == (check.fix == "")


@pytest.mark.timeout(300)
def test_torch_is_as_declared_also_where_the_environment_turns_the_cache_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As wherever s3cache is used: what it puts in torch's place is no fault of torch's."""
    monkeypatch.setenv("S3CACHE_URL", f"file://{tmp_path}")
    [check] = check_torch()
    assert (check.verdict, check.fix) == ("ok", "")


def test_an_import_that_does_not_end_is_not_waited_for() -> None:
    hangs = [sys.executable, "-c", "import time; time.sleep(600)"]
    [check] = check_torch(0.5, hangs)
    assert check.verdict == "fault"
    assert "cannot be imported within 0.5 s" in check.found


def test_each_fault_of_the_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def compiler(text: str) -> None:
        path = tmp_path / "g++"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o700)

    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    [check] = check_compiler()
    assert check.verdict == "warning"
    assert "hits need none" in check.found
    compiler("echo g++ of tests 1.0")
    [check] = check_compiler()
    assert (check.verdict, check.found) == ("ok", "g++ of tests 1.0")
    compiler("exit 3")
    [check] = check_compiler()
    assert (check.verdict, "exit code 3" in check.found) == ("fault", True)
    compiler("exec /bin/sleep 600")
    [check] = check_compiler(0.5)
    assert (check.verdict, "no answer within 0.5 s" in check.found) == ("fault", True)
    monkeypatch.setenv("CXX", "no-such-compiler")
    [check] = check_compiler()
    assert "no-such-compiler" in check.found
