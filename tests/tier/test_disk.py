"""The disk tier: its bounds, pending uploads, files changed by hand, and a full disk."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from s3cache.errors import ConfigError, NoSpaceError, ReadOnlyError
from s3cache.stats import Usage
from s3cache.tier import DiskTier, namespace_of
from tests.tier.sites import MANY, exact, names, on_disk

OpenTier = Callable[..., DiskTier]


def test_an_object_that_was_replaced_is_neither_removed_nor_forgotten(open_tier: OpenTier) -> None:
    """Another process may save it again after it was found corrupt or uploaded."""
    tier = open_tier()
    tier.put_pending("a", b"new")
    tier.delete("a", b"old")
    assert tier.forget_uploaded({"a": b"old"}) == ["a"]
    assert (tier.get("a"), tier.pending()) == (b"new", ["a"])
    tier.delete("a", b"new")
    assert (tier.get("a"), tier.pending(), tier.usage()) == (None, [], Usage(0, 0))


def test_files_removed_and_added_by_hand_are_noticed_at_the_bound(
    open_tier: OpenTier, root: Path
) -> None:
    tier = open_tier(max_files=100)
    for i in range(100):
        tier.put(f"{i:02d}", b"x")
    for i in range(100):
        (root / "objects" / f"{i:02d}").unlink()
    tier.put("new", b"x")
    assert tier.usage() == Usage(1, 1)
    tier.delete("new")
    for i in range(60):
        (root / "objects" / f"by-hand-{i}").write_bytes(b"x")
        os.utime(root / "objects" / f"by-hand-{i}", (0, 0))
    for i in range(101):
        tier.put(f"{i:03d}", b"x")
    assert names(tier) == [f"{i:03d}" for i in range(10, 101)]
    assert exact(tier)


# -- the bounds: eviction order, objects that do not fit, and trimming


def test_smaller_bounds_are_met_by_the_next_put(open_tier: OpenTier) -> None:
    tier = open_tier()
    for i in range(1_000):
        tier.put(f"{i:03d}", b"x")
    tier = open_tier(max_files=10)
    tier.put("new", b"x")
    assert names(tier) == [*(f"{i}" for i in range(991, 1_000)), "new"]


@pytest.mark.parametrize("size", [1, 300])
def test_the_oldest_of_a_sample_are_evicted_if_there_are_many_objects(
    open_tier: OpenTier, root: Path, size: int
) -> None:
    """Other processes wait meanwhile, so at most 16 more are evicted than necessary."""
    tier = open_tier(max_bytes=2_000)
    tier.put_pending("pending", b"x")
    for i in range(1_999):
        (root / "objects" / f"{i:04d}").write_bytes(b"x")
        os.utime(root / "objects" / f"{i:04d}", (i, i))
    (root / "usage").unlink()
    tier.put("new", b"x" * size)
    evicted = {f"{i:04d}" for i in range(1_999)} - {*names(tier)}
    assert max(size, 16) <= len(evicted) <= size + 16
    assert tier.pending() == ["pending"]
    assert exact(tier)
    # If all objects are looked at, the oldest go; of a sample, the oldest quarter goes.
    assert max(evicted) == "0299" if size == 300 else max(evicted) < "1000"


@pytest.mark.parametrize("name", ["", "a//b", "..", "\ud800", "k" * 901])
def test_an_illegal_name_is_refused_and_leaves_nothing(
    open_tier: OpenTier, root: Path, name: str
) -> None:
    tier = open_tier()
    for put in (tier.put, tier.put_pending):
        with pytest.raises(ConfigError):
            put(name, b"x")
    assert os.listdir(root / "staging") == tier.pending() == []


# -- pending objects are never evicted


def test_put_pending_syncs_and_records_an_object_before_it_gets_its_name(
    open_tier: OpenTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So no crash leaves an object that is never uploaded."""
    tier = open_tier()
    order: list[str] = []
    for call in ("fdatasync", "replace"):
        original = getattr(os, call)

        def watched(*args: Any, call: str = call, original: Any = original, **fds: int) -> None:
            order.append(
                f"{call}, {len(tier.pending())} pending, there: {tier.head('a') is not None}"
            )
            original(*args, **fds)

        monkeypatch.setattr(os, call, watched)
    (Path(tier.root) / "objects").mkdir(exist_ok=True)
    tier.put_pending("a", b"x")
    # First its bytes, then its record, and finally its name.
    assert order == ["fdatasync, 0 pending, there: False", "replace, 1 pending, there: False"]
    order.clear()
    tier.put("b", b"x")  # not synced: it can be downloaded again
    assert [step.split(",")[0] for step in order] == ["replace"]

    def fails(source: str, target: str, **_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "replace", fails)
    for name in ("a", "c"):  # only the new record is removed
        with pytest.raises(Exception, match="Input/output"):
            tier.put_pending(name, b"new")
    monkeypatch.undo()
    assert (tier.pending(), tier.get("a"), exact(tier)) == (["a"], b"x", True)


def test_namespaces_share_only_a_root_and_its_bounds(root: Path) -> None:
    """They do not share objects or uploads. The oldest object of any namespace is evicted."""
    one = DiskTier(root, namespace="one", max_bytes=MANY, max_files=3)
    two = DiskTier(root, namespace="two", max_bytes=MANY, max_files=3)
    one.put("a", b"1")
    two.put("a", b"22")
    assert (one.get("a"), two.get("a")) == (b"1", b"22")
    assert [(info.key, info.size) for info in two.objects()] == [("a", 2)]
    two.put_pending("b", b"x")
    assert (one.pending(), two.pending()) == ([], ["b"])
    assert not one.head("b")
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


# -- a disk that is full or cannot be written


def test_a_full_disk(open_tier: OpenTier, small_disk: Path) -> None:
    """A put fails completely, old objects stay, and space that is freed elsewhere can be used."""
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
        assert each.head("a")
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


def test_uploads_left_for_another_remote_are_counted_with_its_url(tmp_path: Path) -> None:
    url = "s3://bucket?endpoint_url=http://127.0.0.1:9"
    bounds: dict[str, Any] = {"max_bytes": 1 << 20, "max_files": 10}
    there = DiskTier(tmp_path / "t", namespace=namespace_of(url), remote=url, **bounds)
    here = DiskTier(tmp_path / "t", namespace=namespace_of("s3://bucket"), **bounds)
    there.put_pending("one", b"data")
    assert here.left_for_others() == {}, "its process lives, and uploads it"
    there.close()
    assert here.left_for_others() == {url: 1}
    assert here.pending() == []
    here.close()
