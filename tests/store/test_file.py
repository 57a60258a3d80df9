"""A directory of objects: one whole file for each, in a private root, swept of leftovers."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from s3cache.errors import (
    AccessDeniedError,
    ConfigError,
    MissingContainerError,
    NoSpaceError,
    PermanentError,
    ReadOnlyError,
    StoreError,
    TransientError,
)
from s3cache.store import FileStore, NotAccepted, ObjectFiles
from tests.support.moments import before_call


@pytest.fixture(autouse=True)
def loop_blocking() -> None:
    """Replaces the fixture in tests/conftest.py, since a test here writes on the loop."""


@pytest.mark.parametrize(
    "prefix", ["\ud800", "\0", "//", "k" * 5_000, "a/" * 3_000, "é" * 100_000, "../", "a\ud800/b"]
)
def test_a_prefix_that_no_key_has_lists_nothing(directory: ObjectFiles, prefix: str) -> None:
    directory.write("a/b", b"x")
    assert [*directory.walk(prefix)] == []


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return a list of all flushes and moves from now on, in order: (call, path)."""
    seen: list[tuple[str, str]] = []

    def watch(call: str, path_of: Callable[..., str]) -> None:
        original = getattr(os, call)

        def watched(*args: Any, **kwargs: Any) -> Any:
            seen.append((call, path_of(*args, **kwargs)))
            return original(*args, **kwargs)

        monkeypatch.setattr(os, call, watched)

    def of_fd(fd: int) -> str:
        path, status = os.readlink(f"/proc/self/fd/{fd}"), os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            return path
        return f"{os.path.dirname(path)}:{status.st_size}"  # a staged file's name is random

    watch("fdatasync", of_fd)
    watch("fsync", of_fd)

    def moved(source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> str:
        return os.path.join(os.readlink(f"/proc/self/fd/{dst_dir_fd}"), target)

    watch("replace", moved)
    watch("link", moved)
    return seen


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
@pytest.mark.parametrize(("create", "move"), [(False, "replace"), (True, "link")])
def test_bytes_are_flushed_before_the_name_and_the_name_before_the_return(
    directory: ObjectFiles, root: Path, events: list[tuple[str, str]], create: bool, move: str
) -> None:
    """So a power failure leaves a whole object or none, and after the return a whole one."""
    directory.write("new/key", b"x" * 1000, create=create)
    objects = root / "objects"
    assert events == [
        ("fdatasync", f"{root}/staging:1000"),
        (move, f"{objects}/new+/key"),
        ("fsync", f"{objects}/new+"),
        ("fsync", f"{objects}"),
        ("fsync", f"{root}"),
    ]
    assert os.listdir(root / "staging") == []


def test_a_write_in_several_calls_is_whole(
    directory: ObjectFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call moves at most 2 GiB, and a signal may cut it short."""
    write, pread = os.write, os.pread
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
    monkeypatch.setattr(os, "pread", lambda fd, n, start: pread(fd, min(n, 5), start))
    directory.write("key", bytes(range(100)))
    assert directory.read("key") == bytes(range(100))
    assert directory.read("key", 50) == bytes(range(50))


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, NoSpaceError),
        (errno.EROFS, ReadOnlyError),
        (errno.EACCES, AccessDeniedError),
        (errno.EIO, TransientError),
        (errno.ESTALE, TransientError),
        (errno.ENOENT, MissingContainerError),
        (errno.EXDEV, PermanentError),
    ],
    ids=lambda value: errno.errorcode[value] if isinstance(value, int) else value.__name__,
)
def test_an_error_of_the_system_becomes_an_s3cache_error(
    directory: ObjectFiles, number: int, kind: type[StoreError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(fd: int, data: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "write", fails)
    with pytest.raises(kind) as caught:
        directory.write("some/key", b"x")
    assert type(caught.value) is kind
    assert isinstance(caught.value.__cause__, OSError)
    assert ("inodes" in str(caught.value)) == (number == errno.ENOSPC)
    assert (caught.value.op, caught.value.key, caught.value.store) == (
        "put", "some/key", directory.url
    )  # fmt: skip


async def test_no_more_is_read_than_was_accepted_even_if_a_larger_object_appears(
    root: Path,
) -> None:
    """The new size is checked too, and one whole version is read."""
    store, files = FileStore(root), ObjectFiles(root)
    sizes: list[int] = []

    def accept(size: int) -> bool:
        sizes.append(size)
        files.write("key", b"much larger")  # between the check and the read
        return size < at_most

    for at_most, answer in ((100, b"much larger"), (10, NotAccepted(11)), (5, NotAccepted(5))):
        sizes.clear()
        files.write("key", b"small")
        assert await store.get("key", accept) == answer
        assert sizes == ([5] if at_most == 5 else [5, 11])


# -- the root: private, perhaps removed, swept of killed writers' files


def test_a_root_is_a_directory_that_others_may_read(root: Path) -> None:
    """Without ``create``, a missing root is an error."""
    with pytest.raises(MissingContainerError):
        ObjectFiles(root, create=False)
    root.write_bytes(b"")
    with pytest.raises(ConfigError, match="not a directory"):
        ObjectFiles(root)
    root.unlink()
    root.mkdir()
    for mode in (0o700, 0o750, 0o755):
        root.chmod(mode)
        ObjectFiles(root).write("key", b"x")
        assert stat.S_IMODE((root / "objects").stat().st_mode) == 0o700


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
    elif verb in ("sweep", "walk"):
        list(getattr(directory, verb)() or ())
    else:
        getattr(directory, verb)("old/key")


def test_only_old_leftovers_are_swept(directory: ObjectFiles, root: Path) -> None:
    leftover = root / "staging" / "0123456789abcdef"
    for age_s in (3_700, 3_500):
        leftover.write_bytes(b"half an obj")
        os.utime(leftover, (time.time() - age_s,) * 2)
        asyncio.run(FileStore(root).aclose())  # opening a store sweeps
        assert leftover.exists() == (age_s < 3_600)


def test_a_write_fails_if_its_staged_file_was_swept(directory: ObjectFiles) -> None:
    with directory.staged("key", b"x", durable=False) as staged:
        os.utime(staged.fd, (0, 0))
        directory.sweep()
        with pytest.raises(FileNotFoundError):
            staged.place()
    assert directory.read("key") is None
