"""Jobs of several processes start warm: DDP's split graphs, tensor parallelism, sharded modules.

All of these are slow: ``make test`` runs none of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.hooks.distributed import WAYS
from tests.support.marks import cases, selected, slow
from tests.support.sites import Site

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Site, list[dict[str, Any]]]:
    """Return a site, and the results of two machines that train with DDP, one after the other."""
    site = Site(tmp_path_factory.mktemp("ways"))
    ways = sorted({"plain", *selected(request, "way")})
    remotes = f"file://{site.root}/remotes"
    return site, site.machine("one").run("distributed:train", remotes, ways)


@slow
@pytest.mark.parametrize("way", cases(WAYS, slow_ones=set(WAYS) - {"plain"}))
def test_ddp_hits_on_every_graph(way: str, trained: tuple[Site, list[dict[str, Any]]]) -> None:
    cold, warm = (seen[way] for seen in trained[1])
    assert cold["saved"] > 1  # DDPOptimizer has split the model
    assert cold["bypassed"] == 0
    assert warm["misses"] == {}
    assert warm["saved"] == 0
    assert sum(warm["hits"].values()) == cold["saved"]
    assert warm["inductor"].get("fxgraph_cache_miss", 0) == 0
    assert warm["seen"] == cold["seen"]


@slow
def test_buckets_that_hit_and_one_that_misses_train_together(
    trained: tuple[Site, list[dict[str, Any]]], tmp_path: Path, site: Site
) -> None:
    """torch compiles the last backward first, and takes metadata from a list in that order."""
    warm, first = trained[0], trained[1][0]["plain"]
    results = site.machine("third").run(
        "distributed:without_each_entry", f"{warm.root}/remotes/plain", str(tmp_path / "copies")
    )
    del results["stderr"]
    alone = results.pop("torch alone")
    assert len(results) == first["saved"]
    for index, seen in results.items():
        assert seen["misses"] == {"absent": 1}, (index, seen)
        assert seen["saved"] == 1, (index, seen)
        assert seen["seen"] == first["seen"], index
    assert alone["seen"] == first["seen"]


@slow
@pytest.mark.parametrize("kind", cases(["ddp", "fsdp"], nightly_ones=["ddp"]))
def test_two_ranks_hit_on_another_machine(site: Site, kind: str) -> None:
    first = site.machine("first").ranks(2, "distributed:one_rank", kind, site.url)
    second = site.machine("second").ranks(2, "distributed:one_rank", kind, site.url)
    for cold, warm in zip(first, second, strict=True):
        assert cold["bypassed"] == 0
        assert warm["misses"] == {}
        assert warm["saved"] == 0
        # There, each rank waited for the graphs that the other one compiled.
        asked = sum(cold["misses"].values()) + sum(cold["hits"].values())
        assert sum(warm["hits"].values()) == asked > 0
        assert warm["losses"] == cold["losses"]
    assert sum(cold["saved"] for cold in first) > 0
