"""The cache works only in directories that it checked, even if others replace their names."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import s3cache.hooks  # before a change of user: others may be unable to read Python's modules
import s3cache.records  # noqa: F401
from s3cache.cache import Cache, Hit, Saved
from s3cache.errors import ConfigError, StoreError
from s3cache.store import ObjectFiles, is_writable_by_others
from s3cache.tier import DiskTier
from tests.support.caching import KEY, entry
from tests.support.users import ATTACKER, VICTIM, as_user, needs_users


def test_a_link_that_replaces_a_moved_root_is_not_followed(root: Path, tmp_path: Path) -> None:
    tier = DiskTier(root, max_bytes=1 << 20, max_files=4)
    tier.put_pending("old", b"x")
    (tmp_path / "elsewhere").mkdir()
    root.rename(tmp_path / "moved")
    root.symlink_to(tmp_path / "elsewhere")
    for i in range(8):
        tier.put(f"a/{i}", b"x")
        assert tier.get(f"a/{i}") == b"x"
    tier.delete("a/7")
    tier.put_pending("new", b"x")
    assert sorted(tier.pending()) == ["new", "old"]
    tier.close()
    assert os.listdir(tmp_path / "elsewhere") == []
    successor = DiskTier(tmp_path / "moved", max_bytes=1 << 20, max_files=4)
    assert sorted(successor.adopt()) == ["new", "old"]
    assert successor.usage().files == len([*successor.objects()]) <= 4
    successor.close()


@pytest.mark.parametrize("depth", ["objects", "objects/one+/two+"])
def test_a_link_inside_is_refused(root: Path, tmp_path: Path, depth: str) -> None:
    """Nothing behind the link is read, written or removed."""
    ObjectFiles(root).write("one/two/three/key", b"ours")
    shutil.move(root / depth, tmp_path / "theirs")
    (root / depth).symlink_to(tmp_path / "theirs")
    before = {path: path.read_bytes() for path in (tmp_path / "theirs").rglob("key")}
    with contextlib.suppress(ConfigError):
        assert [*ObjectFiles(root).walk()] == []
    for call, *data in (("read",), ("write", b"new"), ("delete",), ("stat",)):
        with pytest.raises(ConfigError, match="symbolic link"):
            getattr(ObjectFiles(root), call)("one/two/three/key", *data)
    assert {path: path.read_bytes() for path in (tmp_path / "theirs").rglob("key")} == before


@pytest.mark.parametrize("plant", [os.mkfifo, lambda path: path.symlink_to("/etc/hosts"), os.mkdir])
def test_only_a_regular_file_is_an_object(root: Path, plant: Callable[[Path], object]) -> None:
    """No call waits for the other end of a pipe."""
    files = ObjectFiles(root)
    files.write("a/key", b"x")
    place = root / "objects" / "a+" / "key"
    place.unlink()
    plant(place)
    assert files.read("a/key") is None
    assert files.stat("a/key") is None
    assert [*files.walk()] == []
    if not place.is_dir():
        files.write("a/key", b"ours")
        assert files.read("a/key") == b"ours"
        assert not place.is_symlink()  # so that nothing was written through it


SHARED_GROUP = 12_003
_MODES = [*(pytest.param(mode, marks=needs_users) for mode in (0o770, 0o720)), 0o707, 0o702, 0o1777]


@pytest.mark.parametrize("mode", _MODES)
def test_a_root_that_others_can_write_is_refused(root: Path, mode: int) -> None:
    root.mkdir()
    if mode & 0o020:
        os.chown(root, -1, SHARED_GROUP)
    root.chmod(mode)
    with pytest.raises(ConfigError, match="chmod go-w"):
        ObjectFiles(root)
    assert os.listdir(root) == []


@needs_users
@pytest.mark.parametrize(("members", "is_taken"), [(["victim"], True), (["other"], False)])
def test_a_root_that_only_the_users_private_group_can_write_is_accepted(
    common: Path, monkeypatch: pytest.MonkeyPatch, members: list[str], is_taken: bool
) -> None:
    """useradd gives each user a group with the user's number, for use with umask 002."""
    monkeypatch.setattr(grp, "getgrgid", lambda _: SimpleNamespace(gr_mem=members))
    monkeypatch.setattr(pwd, "getpwuid", lambda number: SimpleNamespace(pw_name="victim"))
    os.chown(common, 0, 0)
    root = common / "root"
    root.mkdir()
    os.chown(root, VICTIM, VICTIM)
    root.chmod(0o775)

    def use() -> None:
        if is_taken:
            ObjectFiles(root).write("a/key", b"x")
        else:
            with pytest.raises(ConfigError, match="can be written by others"):
                ObjectFiles(root)
        assert is_writable_by_others(os.stat(root)) is not is_taken

    as_user(VICTIM, use)


@needs_users
@pytest.mark.parametrize("inside", ["", "objects", "staging"])
def test_a_root_or_subdirectory_of_another_user_is_refused(root: Path, inside: str) -> None:
    ObjectFiles(root).write("a/key", b"x")
    os.chown(root / inside, ATTACKER, ATTACKER)
    with pytest.raises(ConfigError, match=f"belongs to user id {ATTACKER}"):
        ObjectFiles(root)


@needs_users
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("squatted", [Path.mkdir, lambda place: place.symlink_to("/tmp"), None])
def test_a_default_directory_that_others_occupy_costs_only_the_local_tier(
    common: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    squatted: Callable[[Path], object] | None,
) -> None:
    """Without a home it is in the temporary directory, where another user may create it first."""
    os.chown(common, 0, 0)
    common.chmod(0o1777)
    place = common / f"s3cache-{VICTIM}"
    if squatted is None:
        common.chmod(0o755)
    else:
        as_user(ATTACKER, lambda: squatted(place))
    monkeypatch.setenv("HOME", str(common / "nowhere"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(common))

    def work() -> None:
        with Cache.open(f"file://{common}/remote") as cache:
            assert isinstance(cache.save(KEY, entry(KEY)), Saved)
            assert cache.flush(60).complete
            assert isinstance(cache.lookup(KEY), Hit)
        assert caplog.text.count("there is no local tier") == len(caplog.records) == 1
        with pytest.raises((ConfigError, StoreError)):
            Cache.open(strict=True)
        with pytest.raises(ConfigError, match="belongs to user id"):
            Cache.open(local_dir=common / "theirs")  # an explicit directory is an invalid setting

    for user, name in ((VICTIM, "remote"), (ATTACKER, "theirs")):
        (common / name).mkdir()
        os.chown(common / name, user, user)
    as_user(VICTIM, work)


def test_a_root_that_any_user_may_rename_is_refused(tmp_path: Path) -> None:
    above = tmp_path / "above" / "between"
    above.mkdir(parents=True)
    above.parent.chmod(0o777)
    with pytest.raises(ConfigError, match="any user may rename it"):
        ObjectFiles(above / "root")
    above.parent.chmod(0o1777)
    ObjectFiles(above / "root")


def test_a_link_planted_as_the_usage_file_is_replaced(root: Path, tmp_path: Path) -> None:
    """The file that the link points to is not written."""
    root.mkdir(mode=0o700)
    (theirs := tmp_path / "theirs").write_bytes(b"precious")
    (root / "usage").symlink_to(theirs)
    tier = DiskTier(root, max_bytes=1_000, max_files=5)
    for number in range(20):
        tier.put(f"a/{number}", b"x" * 100)
    assert 1 <= tier.usage().files == len([*tier.objects()]) <= 5
    assert theirs.read_bytes() == b"precious"


@pytest.mark.parametrize("umask", [0, 0o002, 0o077])
def test_modes_do_not_depend_on_the_umask(root: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        tier = DiskTier(root / "deep" / "root", max_bytes=1 << 20, max_files=2)
        for i in range(4):
            tier.put(f"a/{i}", b"x")
        tier.put_pending("b", b"x")
        tier.delete("a/3")
        tier.close()
    finally:
        os.umask(before)
    for path in (root / "deep" / "root").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert not stat.S_IMODE(root.stat().st_mode) & 0o022


@needs_users
def test_a_file_of_another_user_is_not_an_object(root: Path) -> None:
    """Another user planted it under the name of a good object."""
    tier = DiskTier(root, max_bytes=1 << 20, max_files=100)
    tier.put("a/key", b"ours")
    os.chown(root / "objects" / "a+" / "key", ATTACKER, ATTACKER)
    assert tier.get("a/key") is None
    assert not tier.head("a/key")
    assert [*tier.objects()] == []
    tier.put("a/key", b"new")
    assert tier.get("a/key") == b"new"
    os.chown(root / "objects" / "a+", ATTACKER, ATTACKER)
    with pytest.raises(ConfigError, match="belongs to user id"):
        DiskTier(root, max_bytes=1 << 20, max_files=100).get("a/key")
