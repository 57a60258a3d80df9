"""The lock on what a directory holds."""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

import pytest

from s3cache.errors import StoreError, TransientError
from s3cache.store import ObjectFiles
from s3cache.tier import DiskTier
from s3cache.tier import _disk as module
from s3cache.tier._disk import Ledger

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
def ledger(directory: ObjectFiles) -> Ledger:
    return Ledger(directory)


def path_of(directory: ObjectFiles) -> str:
    return os.path.join(directory.root, "usage")


# --- the lock


def test_a_lock_that_is_never_released_is_a_transient_error(
    ledger: Ledger, directory: ObjectFiles, monkeypatch: pytest.MonkeyPatch
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
    with ledger.locked():
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
    ledger: Ledger, directory: ObjectFiles, monkeypatch: pytest.MonkeyPatch
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
        ledger.locked(),
        pytest.raises(TransientError),
        Ledger(directory).locked(),
    ):
        pass


def test_no_descriptor_is_left_open(
    ledger: Ledger, directory: ObjectFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOCK_TIMEOUT_S", 0.001)
    tier = DiskTier(directory.root, max_bytes=1 << 20, max_files=100)
    tier.put("first", b"x")
    tier.quarantine("first")
    tier.adopt()  # directories that are used stay open
    before = len(os.listdir("/proc/self/fd"))
    with ledger.locked():
        for _ in range(20):
            with pytest.raises(StoreError):
                tier.put("c", b"x")
    for i in range(20):
        tier.put(f"{i}", b"x")
        tier.get(f"{i}")
        tier.quarantine(f"{i}")
        tier.adopt()
    assert len(os.listdir("/proc/self/fd")) == before
