"""What is still to upload never goes, however old it is."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from s3cache.errors import NoSpaceError
from s3cache.stats import Usage
from s3cache.tier import DiskTier
from tests.tier.disks import MANY, exact, names

if TYPE_CHECKING:
    from collections.abc import Callable

    OpenTier = Callable[..., DiskTier]


def test_a_failing_put_pending_leaves_an_earlier_record(open_tier: OpenTier) -> None:
    tier = open_tier(max_bytes=100)
    tier.put_pending("a", b"a" * 60)
    tier.put_pending("b", b"b" * 40)
    for size in (61, 101):
        with pytest.raises(NoSpaceError):
            tier.put_pending("a", b"x" * size)
        with pytest.raises(NoSpaceError):
            tier.put_pending("new", b"x" * size)
    assert sorted(tier.pending()) == ["a", "b"]
    assert tier.get("a") == b"a" * 60


def test_a_put_pending_that_cannot_rename_takes_only_its_own_record_back(
    open_tier: OpenTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier()
    tier.put_pending("a", b"old")

    def fails(source: str, target: str, **_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "replace", fails)
    for name in ("a", "b"):
        with pytest.raises(Exception, match="Input/output"):
            tier.put_pending(name, b"new")
    monkeypatch.undo()
    assert tier.pending() == ["a"]
    assert tier.get("a") == b"old"
    assert exact(tier)


def test_put_pending_reaches_the_disk_before_it_gets_its_name(
    open_tier: OpenTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is pending before it has its name: no crash leaves an object that is never uploaded."""
    tier = open_tier()
    order: list[str] = []
    for call in ("fdatasync", "replace"):
        original = getattr(os, call)

        def watched(*args: Any, call: str = call, original: Any = original, **fds: int) -> None:
            order.append(f"{call}, {len(tier.pending())} pending, there: {tier.holds('a')}")
            original(*args, **fds)

        monkeypatch.setattr(os, call, watched)
    (Path(tier.root) / "objects").mkdir(exist_ok=True)
    tier.put_pending("a", b"x")
    # First its bytes, then its record, and its name at the end.
    assert order == [
        "fdatasync, 0 pending, there: False",
        "replace, 1 pending, there: False",
    ]
    order.clear()
    tier.put("b", b"x")  # it can be had again: not worth the wait
    assert [step.split(",")[0] for step in order] == ["replace"]


def test_namespaces_share_a_root_and_its_bounds_and_nothing_else(root: Path) -> None:
    """Neither objects nor uploads; the oldest goes, in any namespace."""
    one = DiskTier(root, namespace="one", max_bytes=MANY, max_files=3)
    two = DiskTier(root, namespace="two", max_bytes=MANY, max_files=3)
    one.put("a", b"1")
    two.put("a", b"22")
    assert (one.get("a"), two.get("a")) == (b"1", b"22")
    assert [(info.key, info.size) for info in two.objects()] == [("a", 2)]
    two.put_pending("b", b"x")
    assert (one.pending(), two.pending()) == ([], ["b"])
    assert not one.holds("b")
    assert one.usage() == two.usage() == Usage(4, 3)
    two.put("c", b"x")
    assert (names(one), names(two)) == ([], ["a", "b", "c"])
    one.delete("b")
    assert names(two) == ["a", "b", "c"]
    two.close()
    assert one.adopt() == []
    adopter = DiskTier(root, namespace="two", max_bytes=MANY, max_files=3)
    assert adopter.adopt() == ["b"]
    adopter.close()
    one.close()
