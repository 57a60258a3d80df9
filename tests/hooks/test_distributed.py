"""Jobs of several processes start warm: DDP's split graphs, tensor parallelism, sharded modules."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.sites import Machine, Site

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The remotes of a machine that has trained with DDP in every way, and what it saw."""
    from tests.support.sites import Site

    root = tmp_path_factory.mktemp("ways")
    seen = Site(root).machine("first").run("distributed:every_way", f"file://{root}/remotes")
    return root, seen


def test_ddp_hits_on_every_graph_in_every_way_of_training(
    ways: tuple[Path, dict[str, Any]],
) -> None:
    from tests.support.sites import Site

    root, first = ways
    second = Site(root).machine("second").run("distributed:every_way", f"file://{root}/remotes")
    del first["stderr"], second["stderr"]
    for way, cold in first.items():
        warm = second[way]
        assert cold["bypassed"] == 0, (way, cold)
        assert warm["misses"] == {}, (way, warm)
        assert warm["saved"] == 0, (way, warm)
        assert sum(warm["hits"].values()) == cold["saved"] > 0, (way, cold, warm)
        assert warm["inductor"].get("fxgraph_cache_miss", 0) == 0, (way, warm)
        assert warm["seen"] == cold["seen"], way
    # Several graphs, each with a first call on fake tensors.
    assert first["plain"]["saved"] > 1
    assert first["sizes that change"]["saved"] > first["plain"]["saved"]


def test_buckets_that_hit_and_one_that_misses_train_together(
    ways: tuple[Path, dict[str, Any]], tmp_path: Path, site: Site
) -> None:
    """torch compiles backwards last first, and takes their metadata off a list in that order."""
    root, first = ways
    (tmp_path / "copies").mkdir()
    came_to = site.machine("third").run(
        "distributed:without_each_entry", f"{root}/remotes/plain", f"{tmp_path}/copies"
    )
    del came_to["stderr"]
    alone = came_to.pop("torch alone")
    assert len(came_to) == first["plain"]["saved"]
    for index, seen in came_to.items():
        assert seen["misses"] == {"absent": 1}, (index, seen)
        assert seen["saved"] == 1, (index, seen)
        assert seen["seen"] == first["plain"]["seen"], index
    assert alone["seen"] == first["plain"]["seen"]


def test_check_tells_of_every_graph_that_ddp_splits_off(
    ways: tuple[Path, dict[str, Any]], site: Site
) -> None:
    report = site.machine("checking").run("distributed:check")
    assert report["cacheable"], report
    assert len(report["graphs"]) == ways[1]["plain"]["saved"]


def _two_ranks(machine: Machine, kind: str, url: str) -> list[dict[str, Any]]:
    told = machine.root / "told"
    told.mkdir(parents=True, exist_ok=True)
    done = machine.start(
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "tests.hooks.distributed",
        kind,
        url,
        str(told),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((told / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("kind", ["ddp", "tp", "fsdp"])
def test_two_ranks_under_torchrun_hit_on_another_machine(site: Site, kind: str) -> None:
    first = _two_ranks(site.machine("first"), kind, site.url)
    second = _two_ranks(site.machine("second"), kind, site.url)
    for cold, warm in zip(first, second, strict=True):
        assert cold["bypassed"] == 0
        assert warm["misses"] == {}
        assert warm["saved"] == 0
        assert sum(warm["hits"].values()) == sum(cold["misses"].values()) > 0
        assert warm["losses"] == cold["losses"]
