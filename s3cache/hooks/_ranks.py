"""Ranks: hits that they agree on, and how many compile workers they have together.

Where an option of torch has ranks exchange data while they compile, they agree on hits.

A rank that hits does not take part in the exchange, and one that misses would wait for it for ever.
So a hit is only used if all ranks hit. Each rank writes whether it does to the store of the default
process group, which needs no collective: a rank that never comes does not stop the others.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from s3cache.torch_api import internals
from s3cache.util.logs import logger_of
from s3cache.util.text import pointer

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from s3cache.torch_api.protocols import SharedStore

logger = logger_of("ranks")

# How long a rank that hits waits for the others. They trace the same program; what differs is
# mostly how long each waits for its bucket, and how busy its machine is.
TIMEOUT_S = 60.0
_POLL_S = 0.005
_HIT, _MISS = "hit", "miss"

# Numbers the lookups of each graph. They never start again: a store may outlive a process group.
_numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
# Stores in which ranks ran out of time, as some rank takes no part. Others wait for it once.
_timed_out: weakref.WeakSet[SharedStore] = weakref.WeakSet()


class Agreement:
    """What all ranks say of one lookup, in a ``store`` that they share; without it, always no.

    The first to write the outcome of a round decides it, and a rank only writes "hit" once all have
    said so. So the outcome is the same on all ranks, however late one of them is, and each knows it
    in bounded time. ``name`` is the same on all of them for the same lookup, and for no other one.
    """

    def __init__(
        self, store: SharedStore | None, name: str, ranks: int, *, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._store: SharedStore = store
        self._ranks = ranks
        self._timeout_s = timeout_s
        # First the entry is there and fits, then it is a callable. torch adds what an entry guards
        # to what it knows of sizes as it loads it, so most misses have to be known before that.
        self._rounds = [] if store is None else [f"{name}/found", f"{name}/loaded"]

    def all_hit(self) -> bool:
        """Say that this rank hits so far; return whether all others do. To be called twice."""
        is_hit = bool(self._rounds) and self._decide(self._rounds.pop(0), hits=True)
        if not is_hit:
            self._rounds.clear()
        return is_hit

    def close(self) -> None:
        """Say that this rank does not hit, unless it has said so in all rounds."""
        if self._rounds:
            self._decide(self._rounds[0], hits=False)
            self._rounds.clear()

    def _decide(self, place: str, *, hits: bool) -> bool:
        """Return whether all ranks hit in a round, once that is decided."""
        try:
            outcome = _HIT if hits and self._are_all_here(place) else _MISS
            # Writes it where no rank has; returns what is there.
            return bool(self._store.compare_set(place, "", outcome).decode() == _HIT)
        except Exception:
            logger.warning("ranks cannot agree: a miss %s", pointer("ranks"), exc_info=True)
            return False

    def _are_all_here(self, place: str) -> bool:
        """Count this rank in; return whether it is the last one, else wait for the outcome."""
        if self._store.add(f"{place}/hits", 1) == self._ranks:
            return True
        timeout_s = 0.0 if self._store in _timed_out else self._timeout_s
        deadline = time.monotonic() + timeout_s
        while not self._store.check([place]):
            if time.monotonic() < deadline:
                time.sleep(_POLL_S)
                continue
            if timeout_s:
                _timed_out.add(self._store)
                logger.warning(
                    "not all %d ranks have looked a graph up within %.0f s: hits that they have to "
                    "agree on are misses from now on %s",
                    self._ranks, timeout_s, pointer("ranks"),
                )  # fmt: skip
            break
        return False


def bounded_workers(threads: Callable[[], int]) -> int:
    """Return how many compile workers a rank has, so that those of a machine fit its cores.

    A number that the environment gives holds for each rank, as it does to torch, and so does one
    that follows from cores that a rank has for itself.
    """
    asked, cores = threads(), os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    own = getattr(os, "sched_getaffinity", lambda _: range(cores))(0)
    if "TORCHINDUCTOR_COMPILE_THREADS" in os.environ or len(own) < cores:
        return asked
    if not ranks.isdecimal() or not int(ranks):
        return asked
    return max(1, min(asked, cores // int(ranks)))


def agreement_on(gm: GraphModule, inputs: Sequence[object]) -> Agreement:
    """Return the agreement on the lookup of a graph that is under way."""
    import torch.distributed as dist

    try:
        # Not the key: it may name this rank's device, or its place in a mesh.
        graph = hashlib.sha256("\n".join(_lines(gm, inputs)).encode()).hexdigest()[:32]
        name = f"s3cache/{graph}/{next(_numbers[graph])}"
        return Agreement(internals.default_store.get()(), name, dist.get_world_size())
    except Exception:
        logger.warning("ranks cannot agree: a miss %s", pointer("ranks"), exc_info=True)
        return Agreement(None, "", 0)


def _lines(gm: GraphModule, inputs: Sequence[object]) -> Iterator[str]:
    """Yield lines that are equal on all ranks that compile the same graph, and on no others."""
    import torch

    yield f"grad {torch.is_grad_enabled()}"
    for name, module in gm.named_modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            target = node.target if isinstance(node.target, str) else internals.name_of(node.target)
            yield f"{name} {node.op} {target}"
    for value in inputs:
        yield type(value).__name__
        if isinstance(value, torch.Tensor):
            yield f"{value.dtype} {[str(size) for size in value.shape]}"
