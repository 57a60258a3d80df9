"""The root of a local directory: private, perhaps removed, swept of killed writers' files."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import stat
import time
from pathlib import Path

import pytest

from s3cache.errors import ConfigError, MissingContainerError
from s3cache.store import FileStore, ObjectFiles
from tests.support.moments import before_call


def test_a_root_that_is_a_file_is_refused(root: Path) -> None:
    root.write_bytes(b"")
    with pytest.raises(ConfigError, match="not a directory"):
        ObjectFiles(root)


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o755])
def test_a_root_that_others_can_only_read_is_accepted(root: Path, mode: int) -> None:
    root.mkdir()
    root.chmod(mode)
    ObjectFiles(root).write("key", b"x")
    assert stat.S_IMODE((root / "objects").stat().st_mode) == 0o700


def test_without_create_a_missing_root_is_an_error(root: Path) -> None:
    with pytest.raises(MissingContainerError):
        ObjectFiles(root, create=False)
    assert not root.exists()


@pytest.mark.usefixtures("group_umask")
@pytest.mark.parametrize("verb", ["write", "create", "read", "stat", "delete", "sweep", "walk"])
def test_the_root_may_be_removed_at_any_moment(root: Path, verb: str) -> None:
    """It is created again with its mode, or the error is clear; the next call works."""
    for moment in itertools.count(1):
        directory = ObjectFiles(root)
        directory.write("old/key", b"old")
        with (
            before_call(moment, lambda: shutil.rmtree(root)) as calls,
            contextlib.suppress(MissingContainerError),
        ):
            use(directory, verb)
        if calls.made < moment:
            break
        directory.write("after/all", b"x")
        assert directory.read("after/all") == b"x"
        assert stat.S_IMODE(root.stat().st_mode) == 0o700
        assert os.listdir(root / "staging") == []
        shutil.rmtree(root)
    assert moment > 1


@pytest.mark.parametrize("name", ["objects", "objects/a+", "objects/a+/b+", "moved objects"])
def test_a_directory_that_is_removed_while_it_is_open_is_created_again(
    root: Path, name: str
) -> None:
    directory = ObjectFiles(root)
    directory.write("a/b/key", b"old")
    if name == "moved objects":
        (root / "objects").rename(root.parent / "aside")
    else:
        shutil.rmtree(root / name)
    assert directory.read("a/b/key") is None
    directory.write("a/b/key", b"new")
    assert (root / "objects/a+/b+/key").read_bytes() == b"new"


def use(directory: ObjectFiles, verb: str) -> None:
    if verb in ("write", "create"):
        directory.write("new/key", b"new", create=verb == "create")
    elif verb == "sweep":
        directory.sweep()
    elif verb == "walk":
        list(directory.walk())
    else:
        getattr(directory, verb)("old/key")


def leave_behind(root: Path, age_s: float) -> Path:
    path = root / "staging" / "0123456789abcdef"
    path.write_bytes(b"half an obj")
    then = time.time() - age_s
    os.utime(path, (then, then))
    return path


def test_only_old_leftovers_are_swept(directory: ObjectFiles, root: Path) -> None:
    old = leave_behind(root, age_s=3_700)
    asyncio.run(FileStore(root).aclose())  # opening a store sweeps
    assert not old.exists()
    young = leave_behind(root, age_s=3_500)
    directory.sweep()
    assert young.exists()


def test_a_write_fails_if_its_staged_file_was_swept(
    directory: ObjectFiles,
) -> None:
    def write() -> None:
        with directory.staged("key", b"x", durable=False) as staged:
            os.utime(staged.fd, (0, 0))
            directory.sweep()
            staged.place()

    with pytest.raises(MissingContainerError):
        write()
    assert directory.read("key") is None
