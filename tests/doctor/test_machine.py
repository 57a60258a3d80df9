"""Each fault of a machine is made here, and named with a fix."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from s3cache.doctor import Check, check_disk, check_local_dir
from s3cache.doctor._checks import check_cpu, check_execution
from s3cache.settings import Settings
from tests.support.density import dense
from tests.support.hanging import dead_mount

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path


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
