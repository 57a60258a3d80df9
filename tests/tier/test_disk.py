"""The disk tier: quarantine, files changed by hand, and what lies in its root."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from s3cache.errors import MissingContainerError
from s3cache.stats import Usage
from s3cache.tier import DiskTier
from tests.support.moments import before_call
from tests.tier.disks import exact, names, use

if TYPE_CHECKING:
    from collections.abc import Callable

    OpenTier = Callable[..., DiskTier]


def test_a_quarantined_object_is_a_miss_and_not_counted(open_tier: OpenTier, root: Path) -> None:
    tier = open_tier()
    tier.put("v1/a", b"corrupt")
    tier.put("b", b"x")
    tier.quarantine("v1/a")
    assert tier.get("v1/a") is None
    assert not tier.holds("v1/a")
    assert tier.usage() == Usage(1, 1)
    (aside,) = (root / "quarantine").iterdir()
    assert aside.name.endswith("-v1%2Fa")
    assert aside.read_bytes() == b"corrupt"
    tier.put("v1/a", b"good")
    assert tier.get("v1/a") == b"good"


def test_quarantine_takes_a_name_of_any_length(open_tier: OpenTier, root: Path) -> None:
    tier = open_tier()
    name = "/".join(["k" * 200] * 4)
    tier.put(name, b"x")
    tier.quarantine(name)
    assert len(os.listdir(root / "quarantine")) == 1


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


@pytest.mark.parametrize(
    "verb",
    ["put", "put_pending", "get", "delete", "quarantine", "usage", "adopt", "pending"],
)
def test_root_removed_at_any_moment(open_tier: OpenTier, root: Path, verb: str) -> None:
    """It is made again, as private as before, or that is a clear error; the next call works."""
    umask = os.umask(0o002)
    try:
        for moment in itertools.count(1):
            tier = open_tier(max_files=4)
            tier.put_pending("old/0", b"x")
            for i in range(1, 4):
                tier.put(f"old/{i}", b"x")
            with (
                contextlib.suppress(MissingContainerError),
                before_call(moment, lambda: shutil.rmtree(root)) as calls,
            ):
                use(tier, verb)
            if calls.made < moment:
                break
            tier.put_pending("after/all", b"x")
            assert tier.get("after/all") == b"x"
            assert "after/all" in tier.pending()
            assert exact(tier)
            assert stat.S_IMODE(root.stat().st_mode) == 0o700
            assert os.listdir(root / "staging") == []
            tier.close()
            shutil.rmtree(root)
    finally:
        os.umask(umask)
    assert moment > 1


def test_the_root_says_that_it_is_a_cache(open_tier: OpenTier, root: Path) -> None:
    """https://bford.info/cachedir/"""
    open_tier()
    open_tier()
    tag = (root / "CACHEDIR.TAG").read_bytes()
    assert tag.startswith(b"Signature: 8a477f597d28d172789f06886806bc55\n")
