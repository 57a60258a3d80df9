"""The accounts: exact, or counted anew."""

from __future__ import annotations

import fcntl
import os
import struct
import threading
from typing import TYPE_CHECKING

import pytest

from s3cache.errors import StoreError, TransientError
from s3cache.stats import Usage
from s3cache.store import ObjectFiles
from s3cache.tier import DiskTier
from s3cache.tier import _bounds as module
from s3cache.tier._bounds import Accounts

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
def accounts(directory: ObjectFiles) -> Accounts:
    return Accounts(directory)


def usage(accounts: Accounts) -> Usage:
    with accounts.locked() as books:
        return books.usage


def usage_file(directory: ObjectFiles) -> str:
    return os.path.join(directory.root, "usage")


def test_without_a_file_all_is_counted(accounts: Accounts) -> None:
    assert usage(accounts) == Usage(15, 2)


def test_with_a_file_nothing_is_counted(accounts: Accounts, directory: ObjectFiles) -> None:
    usage(accounts)
    directory.write("by hand", b"x")
    assert usage(accounts) == Usage(15, 2)


def damaged(data: bytes, how: str) -> bytes:
    if how == "cut":
        return data[:-1]
    if how == "magic":
        return b"X" + data[1:]
    if how == "flipped":
        return data[:9] + bytes([data[9] ^ 1]) + data[10:]
    if how == "name":
        return data[:-1] + b"?"
    return {"empty": b"", "zeros": bytes(4096), "garbage": b"\xa5" * 100, "text": b"15 2\n"}[how]


@pytest.mark.parametrize(
    "how", ["cut", "magic", "flipped", "name", "empty", "zeros", "garbage", "text"]
)
def test_a_damaged_file_is_counted_anew(
    accounts: Accounts, directory: ObjectFiles, how: str
) -> None:
    leave_announced(accounts, directory, "some/name")
    with open(usage_file(directory), "rb") as file:
        data = file.read()
    with open(usage_file(directory), "wb") as file:
        file.write(damaged(data, how))
    directory.write("c", b"x")
    assert usage(accounts) == Usage(16, 3)
    directory.write("by hand", b"x")
    assert usage(accounts) == Usage(16, 3)  # now there are books again


def leave_announced(accounts: Accounts, directory: ObjectFiles, name: str) -> None:
    """As a writer leaves the file that is killed after it announced a change of ``name``."""
    with accounts.locked() as books:
        size = books.size_of(name)
        with books.changing(name, size, size), open(usage_file(directory), "rb") as file:
            announced = file.read()
    with open(usage_file(directory), "wb") as file:
        file.write(announced)


@pytest.mark.parametrize("name", ["a/1", "b", "new", "é" * 450])
@pytest.mark.parametrize("change", ["nothing", "grow", "shrink", "delete"])
def test_what_a_killed_writer_announced_is_settled(
    accounts: Accounts, directory: ObjectFiles, name: str, change: str
) -> None:
    """Whether it got to do it or not."""
    leave_announced(accounts, directory, name)
    if change == "delete":
        directory.delete(name)
    elif change != "nothing":
        directory.write(name, b"y" * (100 if change == "grow" else 1))
    found = list(directory.walk())
    for _ in range(2):
        assert usage(accounts) == Usage(sum(info.size for info in found), len(found))


def test_a_change_that_fails_is_booked_as_far_as_it_got(
    accounts: Accounts, directory: ObjectFiles
) -> None:
    def interrupted(done: bool) -> None:
        with accounts.locked() as books, books.changing("b", 5, 50):
            if done:
                directory.write("b", b"x" * 7)
            raise KeyboardInterrupt

    for done in (False, True):
        with pytest.raises(KeyboardInterrupt):
            interrupted(done)
        assert usage(accounts) == Usage(17 if done else 15, 2)


def test_negative_books_are_counted_anew(accounts: Accounts, directory: ObjectFiles) -> None:
    with accounts.locked() as books:
        books.bytes = -1
        with books.changing("b", 5, 5):
            pass
    assert usage(accounts) == Usage(15, 2)


def test_the_layout_is_the_documented_one(accounts: Accounts, directory: ObjectFiles) -> None:
    """Processes of different versions share the file."""
    leave_announced(accounts, directory, "b")
    with open(usage_file(directory), "rb") as file:
        data = file.read()
    magic, size, files, old, name_len, _ = struct.unpack_from("<8sqqqHI", data)
    assert (magic, size, files, old, name_len) == (b"s3cuse1\n", 15, 2, 5, 1)
    assert data[38:] == b"b"


# --- the lock


def test_a_lock_that_is_never_let_go_is_a_transient_error(
    accounts: Accounts, directory: ObjectFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOCK_TIMEOUT_S", 0.02)
    tier = DiskTier(directory.root, max_bytes=1 << 20, max_files=100)
    calls: list[Callable[[], object]] = [
        lambda: tier.put("c", b"x"),
        lambda: tier.put_pending("c", b"x"),
        lambda: tier.delete("b"),
        lambda: tier.quarantine("b"),
        tier.usage,
        tier.trim,
        tier.adopt,
    ]
    with accounts.locked():
        for call in calls:
            with pytest.raises(TransientError, match="another process"):
                call()
        assert tier.get("b") == b"x" * 5  # readers do not wait
        assert tier.pending() == []
        assert os.listdir(os.path.join(directory.root, "staging")) == []
    for call in calls:
        call()
    tier.close()


def test_one_thread_at_a_time(accounts: Accounts) -> None:
    inside: list[int] = []
    most = []

    def work() -> None:
        for _ in range(50):
            with accounts.locked():
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 200
    assert max(most) == 1


def test_a_file_removed_before_it_was_locked_is_no_longer_the_one(
    accounts: Accounts, directory: ObjectFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else two would hold "the" lock: who opened before, and who opened after the removal."""
    flock = fcntl.flock

    def removed_first(fd: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        os.unlink(usage_file(directory))
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", removed_first)
    monkeypatch.setattr(module, "LOCK_TIMEOUT_S", 0.02)
    with (
        accounts.locked(),
        pytest.raises(TransientError),
        Accounts(directory).locked(),
    ):
        pass


def test_no_descriptor_is_left_open(
    accounts: Accounts, directory: ObjectFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOCK_TIMEOUT_S", 0.001)
    tier = DiskTier(directory.root, max_bytes=1 << 20, max_files=100)
    tier.put("first", b"x")
    tier.quarantine("first")
    tier.adopt()  # directories that are used stay open
    before = len(os.listdir("/proc/self/fd"))
    with accounts.locked():
        for _ in range(20):
            with pytest.raises(StoreError):
                tier.put("c", b"x")
    for i in range(20):
        tier.put(f"{i}", b"x")
        tier.get(f"{i}")
        tier.quarantine(f"{i}")
        tier.adopt()
    assert len(os.listdir("/proc/self/fd")) == before
