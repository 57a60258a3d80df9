"""The disk tier: its lock, files changed by hand, and what lies in its root."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from s3cache.errors import TransientError
from s3cache.stats import Usage
from s3cache.store import ObjectFiles
from s3cache.tier import DiskTier
from s3cache.tier import _disk as module
from s3cache.util.threads import close_unshared
from tests.tier.disks import exact, names, use

if TYPE_CHECKING:
    from collections.abc import Callable

    OpenTier = Callable[..., DiskTier]


def test_a_lock_that_is_never_released_is_a_transient_error(
    open_tier: OpenTier, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers do not wait for it, and no descriptor is left open."""
    monkeypatch.setattr(module, "LOCK_TIMEOUT_S", 0.02)
    tier = open_tier()
    tier.put_pending("old/1", b"x")
    lock = ObjectFiles(root).directory().try_lock("usage")
    assert lock is not None
    verbs = ["put", "put_pending", "delete", "usage", "adopt"]
    before = len(os.listdir("/proc/self/fd"))
    for verb in verbs:
        with pytest.raises(TransientError, match="another process"):
            use(tier, verb)
    assert tier.get("old/1") == b"x"
    assert tier.pending() == ["old/1"]
    assert os.listdir(root / "staging") == []
    assert len(os.listdir("/proc/self/fd")) == before
    close_unshared(lock)
    for verb in verbs:
        use(tier, verb)
    assert len(os.listdir("/proc/self/fd")) == before - 1


def test_an_object_that_was_replaced_is_neither_removed_nor_forgotten(open_tier: OpenTier) -> None:
    """As one that was found corrupt, or was uploaded, before another process saved it again."""
    tier = open_tier()
    tier.put_pending("a", b"new")
    tier.delete("a", b"old")
    assert not tier.uploaded("a", b"old")
    assert (tier.get("a"), tier.pending()) == (b"new", ["a"])
    tier.delete("a", b"new")
    assert (tier.get("a"), tier.pending(), tier.usage()) == (None, [], Usage(0, 0))


def test_files_removed_by_hand_are_noticed_at_the_bound(open_tier: OpenTier, root: Path) -> None:
    tier = open_tier(max_files=100)
    for i in range(100):
        tier.put(f"{i:02d}", b"x")
    for i in range(100):
        (root / "objects" / f"{i:02d}").unlink()
    tier.put("new", b"x")
    assert tier.usage() == Usage(1, 1)


def test_files_added_by_hand_are_noticed_at_the_bound(open_tier: OpenTier, root: Path) -> None:
    tier = open_tier(max_files=100)
    for i in range(60):
        (root / "objects" / f"by-hand-{i}").write_bytes(b"x")
        os.utime(root / "objects" / f"by-hand-{i}", (0, 0))
    for i in range(101):
        tier.put(f"{i:03d}", b"x")
    assert names(tier) == [f"{i:03d}" for i in range(10, 101)]
    assert exact(tier)
