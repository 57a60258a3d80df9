"""The local tier: its bounds, who goes first, and what never goes."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import shutil
import stat
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from s3cache.errors import (
    ConfigError,
    MissingContainerError,
    NoSpaceError,
    ReadOnlyError,
    StoreError,
)
from s3cache.stats import Usage
from s3cache.tier import DiskTier
from tests.support.moments import before_call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MANY = 1 << 40


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def open_tier(root: Path) -> Iterator[Callable[..., DiskTier]]:
    tiers = []

    def opened(max_bytes: int = MANY, max_files: int = MANY, at: Path = root) -> DiskTier:
        tiers.append(DiskTier(at, max_bytes=max_bytes, max_files=max_files))
        return tiers[-1]

    yield opened
    for tier in tiers:
        tier.close()


def names(tier: DiskTier) -> list[str]:
    return sorted(info.key for info in tier.objects())


def on_disk(root: Path) -> Usage:
    sizes = [path.stat().st_size for path in (root / "objects").rglob("*") if path.is_file()]
    return Usage(sum(sizes), len(sizes))


def exact(tier: DiskTier) -> bool:
    return tier.usage() == on_disk(Path(tier.root))


OpenTier = "Callable[..., DiskTier]"

# --- who goes first


def test_the_least_recently_used_goes_first(open_tier: OpenTier) -> None:
    """In exactly the order of last use, also where all happens within one tick of the clock."""
    tier = open_tier(max_files=200)
    order = [f"{i:03d}" for i in range(200)]
    random.Random(1).shuffle(order)
    for name in order:
        tier.put(name, b"x")
    used = random.Random(2).sample(order, 100)
    for name in used:
        tier.get(name)
    order = [name for name in order if name not in used] + used
    for i in range(200):
        tier.put(f"new{i}", b"x")
        assert set(names(tier)) == {*order[i + 1 :], *(f"new{n}" for n in range(i + 1))}


def test_what_is_only_looked_at_is_not_used(open_tier: OpenTier) -> None:
    tier = open_tier(max_files=2)
    tier.put("a", b"x")
    tier.put("b", b"x")
    assert tier.holds("a")
    tier.peek("a")
    list(tier.objects())
    tier.put("c", b"x")
    assert names(tier) == ["b", "c"]


def test_used_after_it_was_chosen_it_stays(open_tier: OpenTier) -> None:
    """One scan chooses many; what is used before its turn comes is no longer the oldest."""
    tier = open_tier(max_files=10)
    for i in range(10):
        tier.put(f"{i}", b"x")
    tier.put("a", b"x")  # scans, and evicts 0
    tier.get("1")
    tier.put("b", b"x")
    assert names(tier) == sorted("13456789ab")


def test_bounded_by_bytes(open_tier: OpenTier) -> None:
    tier = open_tier(max_bytes=100)
    for name, size in [("a", 40), ("b", 30), ("c", 30)]:
        tier.put(name, b"x" * size)
    assert tier.usage() == Usage(100, 3)
    tier.put("d", b"x" * 41)
    assert names(tier) == ["c", "d"]
    assert exact(tier)


def test_one_large_object_takes_the_place_of_very_many(open_tier: OpenTier) -> None:
    """More than one scan chooses at a time."""
    tier = open_tier(max_bytes=1_000)
    for i in range(1_000):
        tier.put(f"{i:03d}", b"x")
    tier.put("large", b"x" * 950)
    assert names(tier) == [*(f"{i}" for i in range(950, 1_000)), "large"]
    assert exact(tier)


def test_smaller_bounds_are_met_by_the_next_put(
    open_tier: OpenTier, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier()
    for i in range(1_000):
        tier.put(f"{i:03d}", b"x")
    scans = count_scans(monkeypatch, root)
    tier = open_tier(max_files=10)
    tier.put("new", b"x")
    assert names(tier) == [*(f"{i}" for i in range(991, 1_000)), "new"]
    assert scans() <= 2


def test_eviction_scans_once_for_many_puts(
    open_tier: OpenTier, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(max_files=640)
    for i in range(640):
        tier.put(f"{i}", b"x")
    scans = count_scans(monkeypatch, root)
    for i in range(640):
        tier.put(f"new{i}", b"x")
    assert 1 <= scans() <= 640 / 64
    assert tier.usage().files == 640


def count_scans(monkeypatch: pytest.MonkeyPatch, root: Path) -> Callable[[], int]:
    """How often the directory of all objects was scanned, whatever it takes below it."""
    scandir = os.scandir
    scans = []

    def counted(path: Any) -> Any:
        if os.fspath(path) == str(root / "objects"):
            scans.append(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", counted)
    return lambda: len(scans)


def test_below_the_bounds_nothing_is_scanned(
    open_tier: OpenTier, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(max_files=100)
    scans = count_scans(monkeypatch, root)
    for i in range(100):
        tier.put(f"{i}", b"x")
        tier.get(f"{i}")
    tier.usage()
    assert scans() == 0


# --- what does not fit


def test_larger_than_the_tier_is_refused_and_costs_nobody_a_place(open_tier: OpenTier) -> None:
    tier = open_tier(max_bytes=100)
    tier.put("a", b"a" * 50)
    tier.put("b", b"b" * 50)
    for name in ("a", "b", "c"):  # replacing does not make it fit
        for put in (tier.put, tier.put_pending):
            with pytest.raises(NoSpaceError) as caught:
                put(name, b"x" * 101)
            assert caught.value.__cause__ is None
    assert (tier.get("a"), tier.get("b")) == (b"a" * 50, b"b" * 50)
    assert tier.pending() == []
    assert exact(tier)


def test_as_large_as_the_tier_fits(open_tier: OpenTier) -> None:
    tier = open_tier(max_bytes=100)
    tier.put("a", b"a")
    tier.put("b", b"x" * 100)
    assert names(tier) == ["b"]


def test_where_evicting_all_would_not_do_nothing_is_evicted(open_tier: OpenTier) -> None:
    tier = open_tier(max_bytes=100)
    tier.put("a", b"a" * 20)
    tier.put_pending("pinned", b"p" * 60)
    tier.put("b", b"b" * 20)
    for put in (tier.put, tier.put_pending):
        with pytest.raises(NoSpaceError, match="may not be evicted"):
            put("c", b"c" * 41)
    assert names(tier) == ["a", "b", "pinned"]
    assert tier.pending() == ["pinned"]
    tier.put("c", b"c" * 40)
    assert names(tier) == ["c", "pinned"]


@pytest.mark.parametrize("sizes", [(30, 60), (60, 30), (30, 30), (0, 10), (10, 0)])
def test_replacing_books_the_difference(open_tier: OpenTier, sizes: tuple[int, int]) -> None:
    tier = open_tier()
    tier.put("other", b"x" * 5)
    for size in sizes:
        tier.put("a", b"x" * size)
        assert tier.usage() == Usage(size + 5, 2)
    assert exact(tier)


def test_growing_the_oldest_keeps_the_bound(open_tier: OpenTier) -> None:
    """The object that is replaced is neither evicted for itself nor counted as room."""
    tier = open_tier(max_bytes=100)
    tier.put("a", b"x" * 50)
    tier.put("b", b"x" * 30)
    tier.put("c", b"x" * 20)
    tier.put("a", b"x" * 80)
    assert tier.usage() == Usage(100, 2)
    assert names(tier) == ["a", "c"]
    assert exact(tier)


def test_growing_a_chosen_victim_keeps_the_bound(open_tier: OpenTier) -> None:
    tier = open_tier(max_bytes=100)
    for name in "abcde":
        tier.put(name, b"x" * 20)
    tier.put("f", b"x" * 20)  # evicts a; b is next
    tier.put("b", b"x" * 60)
    assert names(tier) == ["b", "e", "f"]
    assert exact(tier)


def test_a_tier_without_room_takes_nothing(open_tier: OpenTier) -> None:
    tier = open_tier(max_files=0)
    with pytest.raises(NoSpaceError):
        tier.put("a", b"")
    assert tier.usage() == Usage(0, 0)


@pytest.mark.parametrize("verb", ["put", "put_pending"])
@pytest.mark.parametrize("name", ["", "a//b", "..", "\ud800", "k" * 901])
def test_an_illegal_name_is_refused_and_leaves_nothing(
    open_tier: OpenTier, root: Path, verb: str, name: str
) -> None:
    tier = open_tier()
    with pytest.raises(ConfigError):
        getattr(tier, verb)(name, b"x")
    assert os.listdir(root / "staging") == []
    assert tier.pending() == []


# --- what is pending


def test_pending_is_never_evicted_however_old(open_tier: OpenTier) -> None:
    tier = open_tier(max_files=4)
    tier.put_pending("oldest", b"x")
    for i in range(50):
        tier.put(f"{i}", b"x")
    assert names(tier) == ["47", "48", "49", "oldest"]
    tier.uploaded("oldest")
    for i in range(4):
        tier.put(f"new{i}", b"x")
    assert "oldest" not in names(tier)


def test_what_another_has_pending_is_not_evicted_either(open_tier: OpenTier) -> None:
    """Nor what nobody has adopted yet."""
    theirs, ours = open_tier(max_files=3), open_tier(max_files=3)
    theirs.put_pending("oldest", b"x")
    for i in range(20):
        ours.put(f"a{i}", b"x")
    theirs.close()
    for i in range(20):
        ours.put(f"b{i}", b"x")
    assert ours.adopt() == ["oldest"]
    for i in range(20):
        ours.put(f"c{i}", b"x")
    assert names(ours) == ["c18", "c19", "oldest"]


def test_made_pending_after_it_was_chosen_it_stays(open_tier: OpenTier) -> None:
    """Another process may do so with a victim on this one's list."""
    ours, theirs = open_tier(max_files=10), open_tier(max_files=10)
    for i in range(10):
        ours.put(f"{i}", b"x")
    ours.put("a", b"x")  # chooses victims, evicts 0
    theirs.put_pending("1", b"x")
    for i in range(9):
        ours.put(f"new{i}", b"x")
    assert names(ours) == ["1", *(f"new{i}" for i in range(9))]


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

    def fails(source: str, target: str) -> None:
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
    """... and its record comes before the name: no crash leaves an object nobody uploads."""
    tier = open_tier()
    order: list[str] = []
    for call in ("fdatasync", "replace"):
        original = getattr(os, call)

        def watched(*args: Any, call: str = call, original: Any = original) -> None:
            order.append(f"{call}, {len(tier.pending())} pending, there: {tier.holds('a')}")
            original(*args)

        monkeypatch.setattr(os, call, watched)
    (Path(tier.root) / "objects").mkdir(exist_ok=True)
    tier.put_pending("a", b"x")
    assert order == ["fdatasync, 0 pending, there: False", "replace, 1 pending, there: False"]
    order.clear()
    tier.put("b", b"x")  # it can be had again: not worth the wait
    assert [step.split(",")[0] for step in order] == ["replace"]


def test_namespaces_share_a_root_and_its_bounds_and_nothing_else(root: Path) -> None:
    """Neither objects nor records; the oldest goes, whosoever it is."""
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
    one.quarantine("a")
    one.delete("b")
    assert names(two) == ["a", "b", "c"]
    two.close()
    assert one.adopt() == []
    heir = DiskTier(root, namespace="two", max_bytes=MANY, max_files=3)
    assert heir.adopt() == ["b"]
    heir.close()
    one.close()


# --- quarantine


def test_quarantined_it_is_a_miss_and_out_of_the_accounts(open_tier: OpenTier, root: Path) -> None:
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


def test_quarantine_keeps_the_last_eight(open_tier: OpenTier, root: Path) -> None:
    tier = open_tier()
    for i in range(20):
        tier.put(f"{i}", b"%d" % i)
        tier.quarantine(f"{i}")
        tier.quarantine(f"{i}")  # two readers may find the same: nothing else goes for it
        tier.quarantine("never/was")
    kept = sorted((root / "quarantine").iterdir())
    assert [path.read_bytes() for path in kept] == [b"%d" % i for i in range(12, 20)]
    assert tier.usage() == Usage(0, 0)


def test_quarantine_takes_a_name_of_any_length(open_tier: OpenTier, root: Path) -> None:
    tier = open_tier()
    tier.put("é" * 450, b"x")
    tier.quarantine("é" * 450)
    assert len(os.listdir(root / "quarantine")) == 1


# --- trim


@pytest.mark.parametrize("per", ["bytes", "files"])
def test_trim_goes_from_the_high_to_the_low_water_mark(open_tier: OpenTier, per: str) -> None:
    tier = open_tier(**{f"max_{per}": 100})
    for i in range(95):
        tier.put(f"{i:02d}", b"x")
    assert tier.trim() == 0
    tier.put("95", b"x")
    assert tier.trim() == 6
    assert names(tier) == [f"{i:02d}" for i in range(6, 96)]
    assert exact(tier)


def test_trim_reaches_the_mark_through_many_small_ones(open_tier: OpenTier) -> None:
    tier = open_tier(max_bytes=1_000)
    for i in range(300):
        tier.put(f"{i:03d}", b"x")
    tier.put("large", b"x" * 700)
    tier.trim()
    assert tier.usage() == Usage(900, 201)


def test_trim_leaves_what_is_pending(open_tier: OpenTier) -> None:
    tier = open_tier(max_files=10)
    for i in range(10):
        (tier.put_pending if i % 2 else tier.put)(f"{i}", b"x")
    assert tier.trim() == 1
    assert names(tier) == sorted("123456789")
    for i in range(2, 10, 2):
        tier.put_pending(f"{i}", b"x")
    tier.put_pending("0", b"x")
    assert tier.trim() == 0


def test_trim_takes_notice_of_files_removed_by_hand(open_tier: OpenTier, root: Path) -> None:
    """It does not evict more in the place of what is no longer there."""
    tier = open_tier(max_files=100)
    for i in range(100):
        tier.put(f"{i:02d}", b"x")
    for i in range(50):
        (root / "objects" / f"{i:02d}").unlink()
    assert tier.trim() == 0
    assert tier.usage() == Usage(50, 50)


# --- changed by hand


def test_files_removed_by_hand_are_off_the_books_at_the_bound(
    open_tier: OpenTier, root: Path
) -> None:
    tier = open_tier(max_files=100)
    for i in range(100):
        tier.put(f"{i:02d}", b"x")
    for i in range(100):
        (root / "objects" / f"{i:02d}").unlink()
    tier.put("new", b"x")
    assert tier.usage() == Usage(1, 1)


def test_files_added_by_hand_are_booked_in_the_end(open_tier: OpenTier, root: Path) -> None:
    tier = open_tier(max_files=100)
    for i in range(60):
        (root / "objects" / f"by-hand-{i}").write_bytes(b"x")
        os.utime(root / "objects" / f"by-hand-{i}", (0, 0))
    for i in range(101):
        tier.put(f"{i:03d}", b"x")
    assert names(tier) == [f"{i:03d}" for i in range(1, 101)]
    assert exact(tier)


def test_deleting_more_than_was_booked_counts_anew(open_tier: OpenTier, root: Path) -> None:
    tier = open_tier()
    for i in range(3):
        (root / "objects" / f"{i}").write_bytes(b"by hand")
    tier.delete("0")
    assert tier.usage() == Usage(14, 2)


@pytest.mark.parametrize(
    "verb",
    ["put", "put_pending", "get", "delete", "quarantine", "usage", "trim", "adopt", "pending"],
)
def test_root_removed_at_any_moment(open_tier: OpenTier, root: Path, verb: str) -> None:
    """It is made anew, as private as before, or that is a clear error; the next call works."""
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


def use(tier: DiskTier, verb: str) -> None:
    if verb in ("put", "put_pending"):
        getattr(tier, verb)("new/key", b"x")
    elif verb in ("usage", "trim", "adopt", "pending"):
        getattr(tier, verb)()
    else:
        getattr(tier, verb)("old/1")


def test_the_root_says_that_it_is_a_cache(open_tier: OpenTier, root: Path) -> None:
    """https://bford.info/cachedir/"""
    open_tier()
    open_tier()
    tag = (root / "CACHEDIR.TAG").read_bytes()
    assert tag.startswith(b"Signature: 8a477f597d28d172789f06886806bc55\n")


def test_all_that_is_made_is_private(open_tier: OpenTier, root: Path) -> None:
    umask = os.umask(0o002)
    try:
        root.mkdir(mode=0o755)
        root.chmod(0o755)
        tier = open_tier()
        tier.put_pending("a/b", b"x")
        tier.put("c", b"x")
        tier.quarantine("c")
    finally:
        os.umask(umask)
    for path in root.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


# --- a disk that is full or cannot be written


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB of its own; remount it as you like."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = os.geteuid() == 0 and shutil.which("mount") is not None
    if mounted:
        command = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "s3cache-test", str(path)]
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    if not mounted:
        pytest.skip("mounting a small tmpfs is not permitted here")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


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
    """Not even the accounts could be written if they were not there already."""
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
            lambda tier: tier.quarantine("a"),
            lambda tier: tier.adopt(),
        ):
            with pytest.raises(ReadOnlyError) as caught:
                change(each)
            assert isinstance(caught.value.__cause__, OSError)
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    for each in (tier, opened_later):
        each.put("c", b"x")
        assert each.usage() == on_disk(root) == Usage(3, 3)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_failing_at_any_moment_is_whole_or_nothing(
    open_tier: OpenTier, root: Path, number: int
) -> None:
    """Wherever the disk fails: one of our errors, one whole version, exact accounts."""

    def fail() -> None:
        raise OSError(number, os.strerror(number))

    for verb, moment in itertools.product(["put", "put_pending", "delete"], range(1, 80)):
        tier = open_tier(max_files=2)
        tier.put("old/1", b"1")
        tier.put("old/2", b"22")
        before = names(tier)
        with contextlib.suppress(StoreError), before_call(moment, fail):
            use(tier, verb)
        assert tier.get("new/key") in (None, b"x")
        assert set(names(tier)) <= {*before, "new/key"}
        assert exact(tier)
        assert tier.usage().files <= 2
        tier.close()
        shutil.rmtree(root)


def test_many_are_put_as_each_would_be(open_tier: OpenTier, root: Path) -> None:
    tier = open_tier(max_files=3, max_bytes=100)
    tier.put("old", b"x" * 10)
    failed = tier.put_all([("a", b"1"), ("huge", bytes(101)), ("b", b"2"), ("a", b"333")])
    assert list(failed) == ["huge"]
    assert isinstance(failed["huge"], NoSpaceError)
    assert {name: tier.get(name) for name in ("a", "b", "old")} == {
        "a": b"333",
        "b": b"2",
        "old": b"x" * 10,
    }
    assert tier.put_all([("c", b"3")]) == {}
    assert len(names(tier)) == 3  # one had to go
    assert tier.usage() == on_disk(root)


def test_what_is_recorded_is_not_evicted_by_many(open_tier: OpenTier) -> None:
    tier = open_tier(max_files=2)
    tier.put_pending("mine", b"x")
    failed = tier.put_all([("a", b"1"), ("b", b"2"), ("c", b"3")])
    assert failed == {}
    assert tier.get("mine") == b"x"
    assert len(names(tier)) == 2
