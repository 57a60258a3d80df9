"""Ranks of a job decide together where compiling itself makes them wait for each other.

Some options of torch have ranks exchange data while they compile (``internals.ranks_must_agree``).
A rank that hits does not take part in that, and one that misses would wait for it for ever. So a
hit is only used there if all ranks hit. Each rank says what it has in the store of the default
process group, which needs no collective: a rank that never comes does not stop the others.
"""

from __future__ import annotations

import hashlib
import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from s3cache._logs import logger_of
from s3cache._pages import pointer
from s3cache.graph import graph_modules
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from s3cache.torch_api.protocols import SharedStore

__all__ = ["RankConsensus", "consensus_for"]

logger = logger_of("ranks")

# How long a rank that hits waits for the others. They trace the same program: what is between them
# is above all how long each waits for its bucket, and how busy its machine is.
TIMEOUT_S = 60.0
_POLL_S = (0.001, 0.05)
_HIT, _MISS = "hit", "miss"
# Twice: the entry is there and fits; it is a callable. torch adds what an entry guards to what it
# knows of shapes when it loads it, so that most misses are to be known before that.
_ROUNDS = ("found", "loaded")

_mutex = threading.Lock()
# Never forgotten, for the store outlives a session, and a process group.
_occurrences: Counter[str] = Counter()
# Stores in which ranks ran out of time: some rank takes no part. Others wait for it once.
_timed_out: weakref.WeakSet[SharedStore] = weakref.WeakSet()


class RankConsensus:
    """What all ranks say of one graph.

    The outcome is the same on all ranks, whichever of them is late, and each rank knows it in
    bounded time: the first to write a round's outcome decides it, and none writes "hit" before all
    have said so.

    Args:
        store: one that all ranks share; without it, the answer is always no.
        name: the same on all ranks for the same graph, and for no other one.
        ranks: how many there are.
    """

    def __init__(
        self, store: SharedStore | None, name: str, ranks: int, *, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._store = store
        self._name = name
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._rounds = [] if store is None else list(_ROUNDS)

    def all_hit(self) -> bool:
        """Say that this rank hits so far; return whether all others do. To be called twice.

        After a "no" there is nothing more to say.
        """
        if not self._rounds:
            return False
        place = f"{self._name}/{self._rounds.pop(0)}"
        try:
            outcome = self._outcome(place)
        except Exception:
            logger.warning(
                "ranks could not decide together: a miss %s", pointer("ranks"), exc_info=True
            )
            outcome = _MISS
        if outcome != _HIT:
            self._rounds.clear()
        return outcome == _HIT

    def close(self) -> None:
        """This rank does not hit, unless it has said so in all rounds."""
        if self._rounds and self._store is not None:
            place = f"{self._name}/{self._rounds[0]}"
            self._rounds.clear()
            try:
                self._store.compare_set(place, "", _MISS)
            except Exception:
                logger.warning("other ranks do not learn of a miss", exc_info=True)

    def _outcome(self, place: str) -> str:
        assert self._store is not None
        proposed = _MISS
        if self._store.add(f"{place}/hits", 1) == self._ranks:
            proposed = _HIT
        else:
            timeout_s = 0.0 if self._store in _timed_out else self._timeout_s
            deadline, pause_s = time.monotonic() + timeout_s, _POLL_S[0]
            while not (is_decided := self._store.check([place])) and time.monotonic() < deadline:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _POLL_S[1])
            if not is_decided and timeout_s:
                _timed_out.add(self._store)
                logger.warning(
                    "not all %d ranks have looked a graph up within %.0f s: hits that they have to "
                    "agree on are misses from now on %s",
                    self._ranks, timeout_s, pointer("ranks"),
                )  # fmt: skip
        # Sets it where no rank has; returns what there is.
        return self._store.compare_set(place, "", proposed).decode()


def consensus_for(gm: GraphModule, inputs: Sequence[object]) -> RankConsensus:
    """Return the consensus on the graph that is looked up now, where ranks have to agree."""
    import torch.distributed as dist

    try:
        # Not the key: it may name this rank's device, or its place in a mesh.
        graph = hashlib.sha256("\n".join(_lines(gm, inputs)).encode()).hexdigest()[:32]
        with _mutex:
            _occurrences[graph] += 1
            name = f"s3cache/{graph}/{_occurrences[graph]}"
        return RankConsensus(internals.default_store.get()(), name, dist.get_world_size())
    except Exception:
        logger.warning("ranks cannot decide together: a miss %s", pointer("ranks"), exc_info=True)
        return RankConsensus(None, "", 0)


def _lines(gm: GraphModule, inputs: Sequence[object]) -> list[str]:
    """What is the same on all ranks that compile the same graph, and differs where they do not."""
    import torch

    lines = [f"grad {torch.is_grad_enabled()}"]
    for name, module in graph_modules(gm):
        for node in module.graph.nodes:
            target = node.target if isinstance(node.target, str) else internals.name_of(node.target)
            lines.append(f"{name} {node.op} {target}")
    for value in inputs:
        if isinstance(value, torch.Tensor):
            lines.append(f"{value.dtype} {[str(size) for size in value.shape]}")
        else:
            lines.append(type(value).__name__)
    return lines
