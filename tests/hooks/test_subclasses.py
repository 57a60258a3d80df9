"""What a tensor subclass holds inside decides which entry it hits, at both levels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from s3cache.torch_api import installed_release
from tests.hooks.subclasses import SHARDED
from tests.support.marks import nightly, slow
from tests.support.sites import Site

pytestmark = pytest.mark.timeout(900)


def _check(seen: Sequence[dict[str, Any]], lookups: int) -> None:
    """Check that programs behave as they do uncompiled, and that the second machine compiles none.

    A wrong entry fails, since its code checks sizes and strides.
    """
    first, second = seen
    for machine in seen:
        differing = {name: each for name, each in machine["outcomes"].items() if each != "same"}
        assert differing == {}
    assert len(first["outcomes"]) == lookups
    assert first["inductor"]["fxgraph_cache_miss"] > 1
    assert second["inductor"].get("fxgraph_cache_miss", 0) == 0
    assert second["misses"] == {}
    assert second["saved"] == 0


@pytest.mark.needs("device")  # only it knows whether code holds the number of a rank
@pytest.mark.parametrize(
    ("names", "backwards"),
    [
        (["uneven", "empty"], False),
        pytest.param([*SHARDED], True, marks=slow),
        pytest.param([*SHARDED], False, marks=nightly),
    ],
    ids=["some", "all backwards", "all"],
)
def test_ranks_with_different_shards_do_not_share_an_entry(
    site: Site, names: list[str], backwards: bool
) -> None:
    """Their DTensors have equal sizes; which rank comes first does not matter."""
    seen = site.machine("one").run("subclasses:sharded", site.url, names, backwards)
    count = sum(SHARDED[name][0] for name in names)
    _check(seen, count)
    # torch 2.11 makes a new function of each call of to_local(): only the second level shares it.
    if names != [*SHARDED]:
        assert sum(seen[1]["hits"].values()) == (count if installed_release() >= (2, 12) else 0)


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("Registered", 4),
        pytest.param("Unregistered", 10, marks=slow),
        pytest.param("Registered", 120, marks=nightly),
        pytest.param("Unregistered", 120, marks=nightly),
    ],
)
def test_subclasses_with_random_content_hit_their_own_entries(
    kind: str, count: int, site: Site
) -> None:
    """The outer sizes are always equal. Unregistered classes are cached at the second level."""
    seen = site.machine("one").run("subclasses:generated", site.url, [*range(count)], kind)
    _check(seen, count)
    assert seen[1]["bypassed"] == (count if kind == "Unregistered" else 0)


@slow
def test_a_graph_that_returns_a_dtensor_is_shared_at_the_second_level(site: Site) -> None:
    """torch cannot save the mesh of an output. The message says so in the words of the user."""
    first = site.machine("first").ranks(2, "subclasses:return_dtensors", site.url)
    second = site.machine("second").ranks(2, "subclasses:return_dtensors", site.url)
    for rank in (*first, *second):
        assert rank["outcomes"] == {"": "same"}
        assert rank["bypass_reasons"] == {"entry": 1}
        assert "has a device mesh, as each DTensor has" in rank["log"]
        assert "return x.to_local()" in rank["log"]
    assert [rank["inductor"] for rank in first] == [{"fxgraph_cache_miss": 1}] * 2
    assert [rank["inductor"] for rank in second] == [{"fxgraph_cache_hit": 1}] * 2


@slow
def test_ranks_that_redistribute_hit_on_another_machine(site: Site) -> None:
    first = site.machine("first").ranks(2, "subclasses:redistribute", site.url)
    second = site.machine("second").ranks(2, "subclasses:redistribute", site.url)
    for cold, warm in zip(first, second, strict=True):
        _check([cold, warm], 4)
        assert cold["bypassed"] == 0
