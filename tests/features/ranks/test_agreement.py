"""Ranks that wait for each other agree on each hit, in bounded time."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from s3cache.features.ranks.agreement import Agreement, bounded_workers
from s3cache.torch_api.protocols import SharedStore


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


# -- compile workers


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
