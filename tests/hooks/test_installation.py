"""Results of an earlier process are used only from a file that is this user's own."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from shutil import copyfile

import pytest

from s3cache.hooks._directories import fingerprint_of, listing_of, remember_installation
from s3cache.torch_api import internals
from s3cache.util.threads import DeadlineExecutor
from tests.support.hanging import dead_mount
from tests.support.users import needs_users


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Return the keys that s3cache sets in torch."""
    keys: list[bytes] = []
    monkeypatch.setattr(internals, "set_torch_key", keys.append)
    return keys


def forged(directory: Path) -> Path:
    """Write a file that fits this installation, with another key in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(internals.torch_key, "get", lambda: lambda: bytes(32))
        remember_installation(str(directory))
    (path,) = directory.glob("installation")
    return path


def test_a_second_process_computes_nothing(tmp_path: Path, given: list[bytes]) -> None:
    path = forged(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    remember_installation(str(tmp_path))
    assert given == [bytes(32)]


PLANTED: dict[str, Callable[[Path, Path], object]] = {
    "a pipe": lambda path, aside: os.mkfifo(path),
    "a link": lambda path, aside: path.symlink_to(aside),
    "a second name": lambda path, aside: os.link(aside, path),
    "a file without an end": lambda path, aside: os.truncate(copyfile(aside, path), 1 << 40),
    "of another installation": lambda path, aside: path.write_text(
        json.dumps({**json.loads(aside.read_bytes()), "digest": "0" * 64})
    ),
    "no JSON": lambda path, aside: path.write_bytes(aside.read_bytes()[:-1]),
}
BY_ROOT: dict[str, Callable[[Path, Path], object]] = {
    "of another user": lambda path, aside: os.chown(copyfile(aside, path), 12_002, 12_002),
    "/dev/zero": lambda path, _: os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5)),
}


@pytest.mark.parametrize(
    "what", [*PLANTED, *(pytest.param(each, marks=needs_users) for each in BY_ROOT)]
)
def test_a_file_that_other_users_may_have_written_is_not_used(
    what: str, tmp_path: Path, given: list[bytes]
) -> None:
    """s3cache does not wait for the file, and replaces it."""
    (root := tmp_path / "root").mkdir(mode=0o700)
    path = forged(root)
    path.rename(aside := tmp_path / "aside")
    before = aside.read_bytes()
    {**PLANTED, **BY_ROOT}[what](path, aside)
    remember_installation(str(root))
    assert given == []
    assert aside.read_bytes() == before
    assert os.listdir(root) == ["installation"]
    assert json.loads(path.read_bytes())["key"] != "00" * 32
    remember_installation(str(root))
    assert len(given) == 1


@pytest.mark.parametrize("theirs", ["a link", "open to others", "a file", "missing"])
def test_no_file_is_kept_in_a_directory_that_other_users_may_write_to(
    theirs: str, tmp_path: Path, given: list[bytes]
) -> None:
    root, target = tmp_path / "root", tmp_path / "target"
    target.mkdir(mode=0o700)
    forged(target)
    if theirs == "a link":
        root.symlink_to(target)
    elif theirs == "open to others":
        target.rename(root)
        root.chmod(0o777)
    elif theirs == "a file":
        root.write_bytes(b"")
    before = sorted(os.listdir(tmp_path))
    remember_installation(str(root))
    assert given == []
    assert sorted(os.listdir(tmp_path)) == before


def test_a_disk_that_hangs_is_not_waited_for(
    tmp_path: Path, given: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeadlineExecutor, "limit_s", 0.3)
    (dead := tmp_path / "dead").mkdir()
    with dead_mount(dead):
        remember_installation(str(dead))  # hangs here if it waits
    assert given == []


CHANGES: dict[str, Callable[[Path], object]] = {
    "another size": lambda root: (root / "sub/b.py").write_text("longer than it was"),
    "another time": lambda root: os.utime(root / "sub/b.py", ns=(10**18, 10**18 + 1)),
    "one more": lambda root: (root / "sub/new.py").write_text(""),
    "one less": lambda root: (root / "sub/b.py").unlink(),
    "another name": lambda root: (root / "a.py").rename(root / "z.py"),
    "a link to nothing": lambda root: (root / "gone.py").symlink_to(root / "nowhere"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_installation_is_seen(change: str, tmp_path: Path) -> None:
    for name in ("a.py", "sub/b.py", "sub/note.txt", "lib/e.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    for place in (tmp_path, tmp_path / "sub"):
        os.utime(place, (0, 0))
    known = listing_of(str(tmp_path))
    before = fingerprint_of(known)
    (tmp_path / "sub/note.txt").write_text("no source")
    (tmp_path / "lib/e.py").write_text("nor is this one of torch's")
    for kept in (known, None):
        assert fingerprint_of(listing_of(str(tmp_path), kept)) == before
    CHANGES[change](tmp_path)
    for kept in (known, None):
        assert fingerprint_of(listing_of(str(tmp_path), kept)) != before


def test_a_listing_is_kept_unless_a_directory_has_just_changed(
    tmp_path: Path, given: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is added at the same moment may not change its directory's time."""
    listing = listing_of(internals.torch_directory().rstrip(os.sep))
    changed = max(changed for changed, _ in listing.values())
    for later_s, kept in ((0, False), (10, True)):
        monkeypatch.setattr(time, "time_ns", lambda at=changed + later_s * 10**9: at)
        path = forged(tmp_path)
        assert bool(json.loads(path.read_bytes())["listing"]) == kept
    monkeypatch.setattr(os, "scandir", None)
    remember_installation(str(tmp_path))
    assert given == [bytes(32)] * 2
