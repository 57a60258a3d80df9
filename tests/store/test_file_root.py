"""The root of a local directory: private, perhaps gone, swept of what killed writers left."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
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


@pytest.mark.usefixtures("group_umask")
def test_all_that_is_made_is_private(root: Path) -> None:
    directory = ObjectFiles(root)
    directory.write("a/b/c", b"x")
    for path in [root, *root.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_a_root_that_is_a_file_is_refused(root: Path) -> None:
    root.write_bytes(b"")
    with pytest.raises(ConfigError, match="no directory"):
        ObjectFiles(root)


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o755])
def test_a_root_that_others_can_only_read_is_taken(root: Path, mode: int) -> None:
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
def test_root_removed_at_any_moment(root: Path, verb: str) -> None:
    """It is made anew, as private as before, or that is a clear error; the next call works."""
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


def use(directory: ObjectFiles, verb: str) -> None:
    if verb in ("write", "create"):
        getattr(directory, verb)("new/key", b"new")
    elif verb == "sweep":
        directory.sweep()
    elif verb == "walk":
        list(directory.walk())
    else:
        getattr(directory, verb)("old/key")


def test_two_that_list_at_once_get_all_each(directory: ObjectFiles) -> None:
    """They share the descriptors of directories, but not the place they have read up to."""
    present = {f"{number}" for number in range(20)} | {f"below/{number}" for number in range(20)}
    for key in present:
        directory.write(key, b"x")
    for begun in range(len(present) + 1):
        first = directory.walk()
        listed = [next(first).key for _ in range(begun)]
        assert {info.key for info in directory.walk()} == present, begun
        listed += [info.key for info in first]
        assert sorted(listed) == sorted(present), begun


def leave_behind(root: Path, age_s: float) -> Path:
    path = root / "staging" / "0123456789abcdef"
    path.write_bytes(b"half an obj")
    then = time.time() - age_s
    os.utime(path, (then, then))
    return path


def test_leftovers_are_swept_when_they_are_old(directory: ObjectFiles, root: Path) -> None:
    old = leave_behind(root, age_s=3_600)
    assert directory.sweep() == 1
    assert not old.exists()
    young = leave_behind(root, age_s=1)
    assert directory.sweep() == 0
    assert young.exists()


def test_opening_a_store_sweeps(directory: ObjectFiles, root: Path) -> None:
    old = leave_behind(root, age_s=3_600)
    asyncio.run(FileStore(root).aclose())
    assert not old.exists()


def test_a_locked_file_is_not_swept_however_old(directory: ObjectFiles, root: Path) -> None:
    with directory.staged("key", b"x", durable=False) as staged:
        os.utime(staged.path, (0, 0))
        assert directory.sweep() == 0
        directory.rename(staged, "key")
    assert directory.read("key") == b"x"


def test_where_locks_do_not_work_nothing_is_swept(
    directory: ObjectFiles, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can tell then whether the writer lives; writing works all the same."""

    def no_locks(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    old = leave_behind(root, age_s=3_600)
    assert directory.sweep() == 0
    assert old.exists()
    directory.write("key", b"x")
    assert directory.read("key") == b"x"


def test_a_sweep_locks_as_nfs_wants_it(
    directory: ObjectFiles, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exclusive lock over NFS needs a file that is open for writing: flock(2)."""
    flock = fcntl.flock

    def as_on_nfs(fd: int, operation: int) -> None:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        if operation & fcntl.LOCK_EX and flags & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", as_on_nfs)
    leave_behind(root, age_s=3_600)
    assert directory.sweep() == 1


@pytest.mark.parametrize("locked_by_sweep", [False, True])
def test_a_writer_stopped_before_it_could_lock_takes_another_file(
    directory: ObjectFiles, root: Path, locked_by_sweep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file is unlocked and may look old by the time it goes on."""
    flock = fcntl.flock
    held = []

    def swept_first(fd: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        (path,) = (root / "staging").iterdir()
        if locked_by_sweep:  # ... which is about to remove it
            held.append(os.open(path, os.O_RDWR))
            flock(held[0], fcntl.LOCK_EX)
        else:
            path.unlink()
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", swept_first)
    directory.write("key", b"x")
    assert directory.read("key") == b"x"
    with contextlib.suppress(IndexError):
        os.close(held[0])
