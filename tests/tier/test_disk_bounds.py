"""The bounds of the disk tier: who goes first, what does not fit, and trimming."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from s3cache.errors import ConfigError, NoSpaceError
from s3cache.tier import DiskTier
from tests.tier.disks import names

if TYPE_CHECKING:
    from collections.abc import Callable

    OpenTier = Callable[..., DiskTier]


def test_the_least_recently_used_goes_first(open_tier: OpenTier) -> None:
    """In the order of last use, also where all happens within one tick of the clock."""
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
        left = set(names(tier))
        assert 180 < len(left) <= 200
        assert left == {*[*order, *(f"new{n}" for n in range(i + 1))][-len(left) :]}


def test_smaller_bounds_are_met_by_the_next_put(open_tier: OpenTier) -> None:
    tier = open_tier()
    for i in range(1_000):
        tier.put(f"{i:03d}", b"x")
    tier = open_tier(max_files=10)
    tier.put("new", b"x")
    assert names(tier) == [*(f"{i}" for i in range(991, 1_000)), "new"]


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
