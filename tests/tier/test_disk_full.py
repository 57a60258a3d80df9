"""A disk that is full or cannot be written."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from s3cache.errors import NoSpaceError, ReadOnlyError
from s3cache.stats import Usage
from s3cache.tier import DiskTier
from tests.tier.disks import names, on_disk

if TYPE_CHECKING:
    from collections.abc import Callable

    OpenTier = Callable[..., DiskTier]


def test_a_full_disk(open_tier: OpenTier, small_disk: Path) -> None:
    """The put fails whole, what was there stays, and room made elsewhere can be used."""
    root = small_disk / "root"
    tier = open_tier(at=root)
    tier.put("old", b"o" * 1_000)
    (small_disk / "others").write_bytes(b"x" * 700_000)
    for put in (tier.put, tier.put_pending):
        for name in ("old", "new"):
            with pytest.raises(NoSpaceError) as caught:
                put(name, b"n" * 600_000)
            assert isinstance(caught.value.__cause__, OSError)
    assert tier.get("old") == b"o" * 1_000
    assert tier.get("new") is None
    assert tier.pending() == []
    assert os.listdir(root / "staging") == []
    assert tier.usage() == on_disk(root) == Usage(1_000, 1)
    (small_disk / "others").unlink()
    tier.put("new", b"n" * 600_000)
    assert tier.usage() == on_disk(root) == Usage(601_000, 2)


def test_a_disk_without_a_single_free_block(open_tier: OpenTier, small_disk: Path) -> None:
    """Not even the usage could be written if its file were not there already."""
    root = small_disk / "root"
    tier = open_tier(at=root)
    tier.put("old", b"o" * 10_000)
    with contextlib.suppress(OSError), open(small_disk / "others", "wb", buffering=0) as others:
        while others.write(b"x" * 1_024):
            pass
    with pytest.raises(NoSpaceError):
        tier.put("new", b"n" * 10_000)
    assert tier.get("old") == b"o" * 10_000
    tier.delete("old")
    assert tier.usage() == on_disk(root) == Usage(0, 0)
    tier.put("new", b"n" * 8_000)
    assert tier.get("new") == b"n" * 8_000


def test_a_disk_that_becomes_read_only(open_tier: OpenTier, small_disk: Path) -> None:
    root = small_disk / "root"
    tier = open_tier(at=root)
    tier.put("a", b"x")
    tier.put("b", b"y")
    remount = ["mount", "-o", "remount,ro", str(small_disk)]
    subprocess.run(remount, check=True, capture_output=True)
    opened_later = open_tier(at=root)
    for each in (tier, opened_later):
        assert each.get("a") == b"x"
        assert each.peek("a") == b"x"
        assert each.holds("a")
        assert names(each) == ["a", "b"]
        assert each.usage() == Usage(2, 2)
        for change in (
            lambda tier: tier.put("c", b"x"),
            lambda tier: tier.put_pending("c", b"x"),
            lambda tier: tier.delete("a"),
            lambda tier: tier.adopt(),
        ):
            with pytest.raises(ReadOnlyError) as caught:
                change(each)
            assert isinstance(caught.value.__cause__, OSError)
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    for each in (tier, opened_later):
        each.put("c", b"x")
        assert each.usage() == on_disk(root) == Usage(3, 3)
