"""The usage of a directory: exact, or counted again."""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

import pytest

from s3cache.errors import StoreError, TransientError
from s3cache.stats import Usage
from s3cache.store import ObjectFiles
from s3cache.tier import DiskTier
from s3cache.tier import _bounds as module
from s3cache.tier._bounds import UsageFile

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def directory(tmp_path: Path) -> ObjectFiles:
    directory = ObjectFiles(tmp_path / "root")
    directory.write("a/1", b"x" * 10)
    directory.write("b", b"x" * 5)
    return directory


@pytest.fixture
def usage_file(directory: ObjectFiles) -> UsageFile:
    return UsageFile(directory)


def usage(usage_file: UsageFile) -> Usage:
    with usage_file.locked() as ledger:
        return ledger.usage


def path_of(directory: ObjectFiles) -> str:
    return os.path.join(directory.root, "usage")


def test_files_are_counted_once(usage_file: UsageFile, directory: ObjectFiles) -> None:
    assert usage(usage_file) == Usage(15, 2)
    directory.write("by-hand", b"x")
    assert usage(usage_file) == Usage(15, 2)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda _: b"",
        lambda _: bytes(4096),
        lambda data: data + b"x",
        lambda data: data[:-1] + b"\xff",
        lambda _: b"15 2\n",
    ],
    ids=["cut", "empty", "zeros", "long", "negative", "text"],
)
def test_a_damaged_record_is_counted_again(
    usage_file: UsageFile, directory: ObjectFiles, damage: Callable[[bytes], bytes]
) -> None:
    usage(usage_file)
    with open(path_of(directory), "rb") as file:
        data = file.read()
    with open(path_of(directory), "wb") as file:
        file.write(damage(data))
    directory.write("c", b"x")
    assert usage(usage_file) == Usage(16, 3)
    directory.write("by-hand", b"x")
    assert usage(usage_file) == Usage(16, 3)  # the record is good again


@pytest.mark.parametrize("change", ["nothing", "write", "delete"])
def test_what_a_killed_writer_changed_is_counted(
    usage_file: UsageFile, directory: ObjectFiles, change: str
) -> None:
    with (
        usage_file.locked() as ledger,
        ledger.changing(5, 7),
        open(path_of(directory), "rb") as file,
    ):
        left = file.read()
    with open(path_of(directory), "wb") as file:
        file.write(left)
    if change == "write":
        directory.write("b", b"y" * 7)
    elif change == "delete":
        directory.delete("b")
    present = list(directory.walk())
    assert usage(usage_file) == Usage(sum(info.size for info in present), len(present))


@pytest.mark.parametrize("is_done", [True, False])
def test_a_change_that_fails_is_counted(
    usage_file: UsageFile, directory: ObjectFiles, is_done: bool
) -> None:
    def interrupted() -> None:
        with usage_file.locked() as ledger, ledger.changing(5, 50):
            if is_done:
                directory.write("b", b"x" * 7)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert usage(usage_file) == Usage(17 if is_done else 15, 2)


# --- the lock


def test_a_lock_that_is_never_released_is_a_transient_error(
    usage_file: UsageFile, directory: ObjectFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOCK_TIMEOUT_S", 0.02)
    tier = DiskTier(directory.root, max_bytes=1 << 20, max_files=100)
    calls: list[Callable[[], object]] = [
        lambda: tier.put("c", b"x"),
        lambda: tier.put_pending("c", b"x"),
        lambda: tier.delete("b"),
        lambda: tier.quarantine("b"),
        tier.usage,
        tier.adopt,
    ]
    with usage_file.locked():
        for call in calls:
            with pytest.raises(TransientError, match="another process"):
                call()
        assert tier.get("b") == b"x" * 5  # readers do not wait
        assert tier.pending() == []
        assert os.listdir(os.path.join(directory.root, "staging")) == []
    for call in calls:
        call()
    tier.close()


def test_a_file_removed_before_it_was_locked_is_not_the_lock(
    usage_file: UsageFile, directory: ObjectFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else two could hold "the" lock: one on the removed file, one on its successor."""
    flock = fcntl.flock

    def removed_first(fd: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        os.unlink(path_of(directory))
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", removed_first)
    monkeypatch.setattr(module, "LOCK_TIMEOUT_S", 0.02)
    with (
        usage_file.locked(),
        pytest.raises(TransientError),
        UsageFile(directory).locked(),
    ):
        pass


def test_no_descriptor_is_left_open(
    usage_file: UsageFile, directory: ObjectFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOCK_TIMEOUT_S", 0.001)
    tier = DiskTier(directory.root, max_bytes=1 << 20, max_files=100)
    tier.put("first", b"x")
    tier.quarantine("first")
    tier.adopt()  # directories that are used stay open
    before = len(os.listdir("/proc/self/fd"))
    with usage_file.locked():
        for _ in range(20):
            with pytest.raises(StoreError):
                tier.put("c", b"x")
    for i in range(20):
        tier.put(f"{i}", b"x")
        tier.get(f"{i}")
        tier.quarantine(f"{i}")
        tier.adopt()
    assert len(os.listdir("/proc/self/fd")) == before
