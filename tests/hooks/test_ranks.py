"""Ranks that wait for each other while they compile all hit, or all compile."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch._functorch.config as functorch
import torch.distributed as dist

from s3cache.insight import trace
from s3cache.records import Run, in_jobs, recorded
from s3cache.torch_api import installed_release, internals
from tests.hooks.distributed import WAYS
from tests.support.marks import cases, selected, slow
from tests.support.sites import Site

pytestmark = [pytest.mark.timeout(900), pytest.mark.needs("ranks", "single_flight")]


# -- jobs

# Ranks agree on the tensors to save for the backward.
TOGETHER = (
    "torch._functorch.config:_sync_decision_cross_ranks",
    # torch needs the size of every input, and a device mesh has none.
    "torch._functorch.config:unsafe_treat_script_objects_as_zero_size",
)


AGREE = (
    TOGETHER[0],
    "torch._inductor.config:reorder_for_compute_comm_overlap",
    "torch._inductor.config:distributed_max_autotune_gemm",
    "torch._dynamo.config:enable_compiler_collectives",
    "torch._inductor.config:aten_distributed_optimizations.enable_overlap_scheduling",
)


@pytest.mark.parametrize("option", AGREE)
def test_ranks_decide_together_under_each_option(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    assert not internals.hits_need_agreement()
    module, _, name = option.partition(":")
    with importlib.import_module(module).patch({name: True}):
        assert internals.hits_need_agreement()
        if installed_release() >= (2, 15):  # with this option, torch's own lookups agree
            with functorch.patch({"_sync_cache_decision_cross_ranks": True}):
                assert not internals.hits_need_agreement()
        monkeypatch.setattr(dist, "get_world_size", lambda: 1)
        assert not internals.hits_need_agreement()


@slow
def test_ranks_of_a_machine_compile_each_graph_once(site: Site) -> None:
    """One compiles, the other waits; each entry is uploaded once, and losses stay the same."""
    alone = site.machine("alone", S3CACHE_WAIT_S="0").ranks(
        2, "distributed:one_rank", "ddp", f"file://{site.root}/alone?create=1"
    )
    graphs_only = {"S3CACHE_RECALL": "off"}  # uploads are counted
    shared = site.machine("shared", **graphs_only).ranks(2, "distributed:one_rank", "ddp", site.url)
    assert [rank["losses"] for rank in shared] == [rank["losses"] for rank in alone]
    graphs = alone[0]["misses"]["absent"]  # each has a forward and a backward
    lowered = sum(rank["inductor"].get("fxgraph_cache_miss", 0) for rank in shared)
    # A rank may find a forward that the other one has just lowered for another graph.
    assert lowered + sum(rank["fx_hits"] for rank in shared) <= 2 * graphs
    assert sum(rank["misses"].get("absent", 0) for rank in shared) == graphs
    assert sum(rank["claimed"] for rank in shared) == graphs
    assert sum(rank["waits"] for rank in shared) > 0
    assert sum(rank["waits"] + rank["claimed"] for rank in alone) == 0
    assert len(site.entries()) == graphs
    assert sum(rank["uploaded"] for rank in shared) == len(site.entries(halves=True))
    check_trace(recorded([str(site.root / "shared" / "local")]))
    # The job is resumed elsewhere, with another number of ranks.
    warm = site.machine("warm").ranks(3, "distributed:one_rank", "ddp", site.url)
    assert [rank["misses"] for rank in warm] == [{}] * 3


def check_trace(runs: Iterable[Run]) -> None:
    """Check that each rank has a section, with its compiles and waits for the other rank."""
    events = json.loads(trace(in_jobs(runs)[0]))["traceEvents"]
    sections = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    ranks = {pid: name.partition("(rank ")[2][:1] for pid, name in sections.items()}
    assert sorted(ranks.values()) == ["0", "1"]
    waits = [(ranks[e["pid"]], e["name"]) for e in events if e["name"].startswith("wait")]
    assert set(waits) <= {("0", "wait: for rank 1"), ("1", "wait: for rank 0")}
    assert waits
    claims = {ranks[event["pid"]] for event in events if event["name"] == "claim"}
    assert {name[-1] for _, name in waits} <= claims


@slow
def test_ranks_compile_together_if_they_exchange_data_meanwhile(site: Site) -> None:
    """torch's partitioner asks all ranks which tensors to save: a rank alone would hang."""
    cold = site.machine("first").ranks(2, "distributed:one_rank", "tp", site.url, *TOGETHER)
    # A rank that waits would not answer the rank that compiles.
    assert [(rank["claimed"], rank["waits"]) for rank in cold] == [(0, 0)] * 2
    warm = site.machine("second").ranks(2, "distributed:one_rank", "tp", site.url, *TOGETHER)
    for rank in warm:
        assert rank["misses"] == {}
        assert sum(rank["hits"].values()) == 1
    entries = site.entries()
    assert len(entries) == 2  # one for each rank: its place in the mesh is in the key
    entries[0].unlink()
    mixed = site.machine("third").ranks(2, "distributed:one_rank", "tp", site.url, *TOGETHER)
    assert sorted(next(iter(rank["misses"])) for rank in mixed) == ["absent", "ranks"]
    for rank in mixed:
        assert sum(rank["hits"].values()) == 0
        assert rank["saved"] == 1
    for index in range(2):
        assert cold[index]["losses"] == warm[index]["losses"] == mixed[index]["losses"]


# -- jobs of several processes start warm: DDP's split graphs, tensor parallelism, sharded modules


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
@pytest.mark.parametrize(
    "way", cases(WAYS, nightly_ones={"dynamic sizes", "unused parameters", "compiled inside"})
)
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
