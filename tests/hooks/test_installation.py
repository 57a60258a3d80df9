"""What an earlier process computed is believed only from a file of this user's own."""

from __future__ import annotations

import json
import os
import socket
import stat
from typing import TYPE_CHECKING

import pytest

from s3cache.hooks._installation import remember_installation
from s3cache.store import DeadlineExecutor
from s3cache.torch_api import internals
from tests.support.hanging import dead_mount

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The keys that torch is given, instead of its own."""
    keys: list[bytes] = []
    monkeypatch.setattr(internals, "set_torch_key", keys.append)
    return keys


def forged(directory: Path) -> Path:
    """A file that fits this installation, with another key in it."""
    remember_installation(str(directory))
    (path,) = directory.glob("installation.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "torch_key": "00" * 32}))
    return path


def test_a_second_process_computes_nothing(tmp_path: Path, given: list[bytes]) -> None:
    path = forged(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    remember_installation(str(tmp_path))
    assert given == [bytes(32)]


def test_a_file_that_others_may_have_written_is_not_believed(
    tmp_path: Path, given: list[bytes]
) -> None:
    path = forged(tmp_path)
    path.chmod(0o666)
    remember_installation(str(tmp_path))
    assert given == []
    assert json.loads(path.read_text())["torch_key"] != "00" * 32  # and is made anew

    (linked := tmp_path / "linked").mkdir()
    path = forged(linked)
    path.rename(tmp_path / "theirs")
    path.symlink_to(tmp_path / "theirs")
    remember_installation(str(linked))
    assert given == []


def a_pipe(path: Path, aside: Path) -> None:
    os.mkfifo(path)


def a_socket(path: Path, aside: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.path.relpath(path))  # names of sockets are short


def a_directory(path: Path, aside: Path) -> None:
    path.mkdir()


def a_link(path: Path, aside: Path) -> None:
    path.symlink_to(aside)


def a_second_name(path: Path, aside: Path) -> None:
    os.link(aside, path)


def a_file_of_another_user(path: Path, aside: Path) -> None:
    path.write_bytes(aside.read_bytes())
    os.chown(path, 12_002, 12_002)


def a_file_without_an_end(path: Path, aside: Path) -> None:
    with path.open("wb") as file:
        file.write(aside.read_bytes() + b" ")
        file.truncate(1 << 40)


def a_device(path: Path, aside: Path) -> None:
    os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero


def brackets(path: Path, aside: Path) -> None:
    path.write_bytes(b"[" * 4096)


def half_a_key(path: Path, aside: Path) -> None:
    path.write_text(json.dumps({**json.loads(aside.read_text()), "torch_key": "00" * 31}))


PLANTED = [
    a_pipe,
    a_socket,
    a_directory,
    a_link,
    a_second_name,
    a_file_without_an_end,
    brackets,
    half_a_key,
    pytest.param(a_file_of_another_user, marks=needs_root),
    pytest.param(a_device, marks=needs_root),
]


@pytest.mark.parametrize("plant", PLANTED)
def test_what_was_planted_is_not_waited_for_nor_believed_and_gives_way(
    plant: Callable[[Path, Path], None], tmp_path: Path, given: list[bytes]
) -> None:
    (root := tmp_path / "root").mkdir(mode=0o700)
    path = forged(root)
    path.rename(aside := tmp_path / "aside")
    before = aside.read_bytes()
    plant(path, aside)
    remember_installation(str(root))
    assert given == []
    assert aside.read_bytes() == before
    assert os.listdir(root) == ["installation.json"]  # and nothing half done
    assert json.loads(path.read_text())["torch_key"] != "00" * 32
    remember_installation(str(root))
    assert len(given) == 1


def test_a_directory_that_does_not_give_way_stays_and_nothing_grows(
    tmp_path: Path, given: list[bytes]
) -> None:
    (tmp_path / "installation.json" / "theirs").mkdir(parents=True)
    for _ in range(3):
        remember_installation(str(tmp_path))
    assert given == []
    assert os.listdir(tmp_path) == ["installation.json"]


@pytest.mark.parametrize("theirs", ["a link", "open to others", "a file", "missing"])
def test_nothing_is_kept_where_others_may_write(
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
