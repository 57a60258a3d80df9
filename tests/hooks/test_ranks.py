"""Ranks that wait for each other while they compile all hit, or all compile."""

from __future__ import annotations

import importlib
import json
import math
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import pytest
import torch._functorch.config as functorch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from s3cache.hooks._ranks import Agreement, bounded_workers
from s3cache.insight import trace
from s3cache.records import Run, in_jobs, recorded
from s3cache.torch_api import internals
from s3cache.torch_api.protocols import SharedStore
from tests.support.marks import slow
from tests.support.sites import Site

TORCH = tuple(map(int, version("torch").split(".")[:2]))

pytestmark = pytest.mark.timeout(900)

# -- one graph


def vote(
    store: SharedStore, ranks: Sequence[Callable[[Agreement], object]], timeout_s: float = 20
) -> list[object]:
    """Let all ranks vote at once; return the answers that each rank gets."""
    answers: list[object] = [None] * len(ranks)

    def run(index: int) -> None:
        answers[index] = ranks[index](Agreement(store, "graph", len(ranks), timeout_s=timeout_s))

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def hits(agreement: Agreement) -> list[bool]:
    """A rank that finds its entry, and loads it if all ranks have found theirs."""
    answers = [agreement.all_hit()]
    if answers[0]:
        answers.append(agreement.all_hit())
    agreement.close()
    return answers


def misses(agreement: Agreement) -> None:
    agreement.close()


def cannot_load(agreement: Agreement) -> list[bool]:
    answers = [agreement.all_hit()]
    agreement.close()
    return answers


@pytest.mark.parametrize(
    ("ranks", "answers"),
    [
        ([hits] * 3, [[True, True]] * 3),
        ([hits, misses, hits], [[False], None, [False]]),
        ([hits, cannot_load], [[True, False], [True]]),
    ],
)
def test_all_hit_if_all_find_and_load_their_entry(ranks: Any, answers: list[object]) -> None:
    """One miss makes all ranks miss at once: the time-out is longer than a test may take."""
    assert vote(HashStore(), ranks, timeout_s=3600) == answers


def test_the_wait_for_a_missing_rank_is_bounded() -> None:
    """If it comes late, it gets the decision of the others."""
    store = HashStore()
    assert vote(store, [hits, lambda _: None], timeout_s=0.3) == [[False], None]
    assert not Agreement(store, "graph", 2).all_hit()


def test_ranks_wait_once_for_a_rank_that_takes_no_part(caplog: pytest.LogCaptureFixture) -> None:
    """They do not wait for each graph. A later process group, with another store, waits again."""
    store, waited = HashStore(), []

    class Waiting:
        """A store that counts the checks that found no decision."""

        def __init__(self) -> None:
            self.add, self.compare_set = store.add, store.compare_set

        def check(self, keys: list[str]) -> bool:
            is_there: bool = store.check(keys)
            waited.append(keys[0]) if not is_there else None
            return is_there

    shared: Any = Waiting()
    for graph in range(20):
        assert not Agreement(shared, f"graph {graph}", 2, timeout_s=0.2).all_hit()
    graphs = Counter(waited)
    assert len(graphs) == 20
    assert max(graphs, key=lambda place: graphs[place]).startswith("graph 0/")
    assert graphs.pop("graph 0/found") > 1  # it waited
    assert set(graphs.values()) == {1}  # and looked once
    (record,) = caplog.records
    assert "not all 2 ranks" in record.getMessage()
    assert vote(HashStore(), [hits] * 2) == [[True, True]] * 2


def test_late_ranks_get_the_same_outcome() -> None:
    """Ranks come when others are about to give up: all ranks hit, or all miss."""
    seen = set()
    for seed in range(30):
        delays = random.Random(seed)
        store = HashStore()
        pauses = [delays.uniform(0, 0.06) for _ in range(3)]

        def late(agreement: Agreement, pauses: list[float] = pauses) -> bool:
            time.sleep(pauses.pop())
            return agreement.all_hit()

        answers = vote(store, [late] * 3, timeout_s=0.03)
        assert len(set(answers)) == 1, (seed, answers)
        seen |= set(answers)
    assert seen == {True, False}  # so both were possible


def test_a_store_that_fails_is_a_miss(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def add(self, *_: object) -> int:
            raise RuntimeError("connection reset")

        check = compare_set = add

    broken: Any = Broken()
    assert not Agreement(broken, "graph", 2).all_hit()
    Agreement(broken, "graph", 2).close()
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert not Agreement(None, "graph", 2).all_hit()


# -- limits of a rank: compile workers, and waits


@pytest.mark.parametrize(
    ("cores", "own", "ranks", "asked", "allowed"),
    [
        (16, 16, "4", 16, 4),
        (16, 16, "32", 16, 1),
        (256, 256, "8", 32, 32),  # torch asks for no more
        (16, 4, "4", 4, 4),  # each rank has its own cores
        (16, 16, "0", 16, 16),
        (16, 16, "many", 16, 16),
    ],
)
def test_compile_workers_of_all_ranks_fit_the_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, own: int, ranks: str, asked: int, allowed: int
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(own)), raising=False)
    assert bounded_workers(lambda: asked) == allowed
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", str(asked))
    assert bounded_workers(lambda: asked) == asked


def test_a_wait_is_bounded_by_the_time_out_of_the_process_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert internals.group_timeout_s() == math.inf
    store = HashStore()
    store.set_timeout(timedelta(seconds=90))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    assert internals.group_timeout_s() == 90


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
    assert not internals.ranks_must_agree()
    module, _, name = option.partition(":")
    with importlib.import_module(module).patch({name: True}):
        assert internals.ranks_must_agree()
        if TORCH >= (2, 15):  # with this option, torch's own lookups agree
            with functorch.patch({"_sync_cache_decision_cross_ranks": True}):
                assert not internals.ranks_must_agree()
        monkeypatch.setattr(dist, "get_world_size", lambda: 1)
        assert not internals.ranks_must_agree()


@slow
def test_ranks_of_a_machine_compile_each_graph_once(site: Site) -> None:
    """One compiles, the other waits; each entry is uploaded once, and losses stay the same."""
    alone = site.machine("alone", S3CACHE_WAIT_S="0").ranks(
        2, "distributed:one_rank", "ddp", f"file://{site.root}/alone?create=1"
    )
    shared = site.machine("shared").ranks(2, "distributed:one_rank", "ddp", site.url)
    assert [rank["losses"] for rank in shared] == [rank["losses"] for rank in alone]
    graphs = alone[0]["misses"]["absent"]  # each has a forward and a backward
    lowered = sum(rank["inductor"].get("fxgraph_cache_miss", 0) for rank in shared)
    # A rank may find a forward that the other one has just lowered for another graph.
    assert lowered + sum(rank["fx_hits"] for rank in shared) <= 2 * graphs
    assert sum(rank["misses"].get("absent", 0) for rank in shared) == graphs
    assert sum(rank["led"] for rank in shared) == graphs
    assert sum(rank["waits"] for rank in shared) > 0
    assert sum(rank["waits"] + rank["led"] for rank in alone) == 0
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
    leads = {ranks[event["pid"]] for event in events if event["name"] == "lead"}
    assert {name[-1] for _, name in waits} <= leads


@slow
def test_ranks_compile_together_if_they_exchange_data_meanwhile(site: Site) -> None:
    """torch's partitioner asks all ranks which tensors to save: a rank alone would hang."""
    cold = site.machine("first").ranks(2, "distributed:one_rank", "tp", site.url, *TOGETHER)
    # A rank that waits would not answer the rank that compiles.
    assert [(rank["led"], rank["waits"]) for rank in cold] == [(0, 0)] * 2
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
