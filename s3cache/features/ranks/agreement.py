"""Ranks: make them agree on hits, and bound their compile workers.

With some options of torch, ranks exchange data while they compile. A rank that hits does not take
part in the exchange, and a rank that misses would wait for it forever. So a hit is only used if all
ranks hit. Each rank writes its outcome to the store of the default process group. This needs no
collective: a rank that never arrives does not block the others.
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

# How long a rank that hits waits for the others. All trace the same program. They differ mostly in
# the latency of the bucket and in the load of the machine.
TIMEOUT_S = 60.0
_POLL_S = 0.005
_HIT, _MISS = "hit", "miss"

# Numbers of the lookups of each graph. They are never reused: a store may outlive a process group.
_numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
# Stores in which ranks timed out because a rank takes no part. We wait for such a rank once.
_timed_out: weakref.WeakSet[SharedStore] = weakref.WeakSet()


class Agreement:
    """The agreement of all ranks on one lookup, in a shared ``store``; without one, always a miss.

    The first rank to write the outcome of a round decides it. A rank writes "hit" only after all
    ranks have reported a hit. So all ranks get the same outcome in bounded time, even if one is
    late. ``name`` identifies the lookup and is equal on all ranks.
    """

    def __init__(
        self, store: SharedStore | None, name: str, ranks: int, *, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._store: SharedStore = store
        self._ranks = ranks
        self._timeout_s = timeout_s
        # Round 1: the entry exists and fits. Round 2: torch has loaded it. Loading adds the guards
        # of the entry to torch's knowledge of sizes, so most misses must be detected before.
        self._rounds = [] if store is None else [f"{name}/found", f"{name}/loaded"]

    def all_hit(self) -> bool:
        """Report that this rank hits; return whether all ranks do. Call it once per round."""
        is_hit = bool(self._rounds) and self._decide(self._rounds.pop(0), hits=True)
        if not is_hit:
            self._rounds.clear()
        return is_hit

    def close(self) -> None:
        """Report a miss of this rank in all rounds that are left."""
        if self._rounds:
            self._decide(self._rounds[0], hits=False)
            self._rounds.clear()

    def _decide(self, place: str, *, hits: bool) -> bool:
        """Return whether all ranks hit in a round; wait until that is decided."""
        try:
            outcome = _HIT if hits and self._are_all_here(place) else _MISS
            # Writes the outcome if there is none; returns the stored one.
            return bool(self._store.compare_set(place, "", outcome).decode() == _HIT)
        except Exception:
            logger.warning("ranks cannot agree: a miss %s", pointer("ranks"), exc_info=True)
            return False

    def _are_all_here(self, place: str) -> bool:
        """Count this rank; return whether it is the last one, else wait for the outcome."""
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
                    "not all %d ranks looked a graph up within %.0f s: from now on, hits that "
                    "ranks have to agree on are misses %s",
                    self._ranks, timeout_s, pointer("ranks"),
                )  # fmt: skip
            break
        return False


def bounded_workers(threads: Callable[[], int]) -> int:
    """Return how many compile workers a rank may have, so that all of a machine fit its cores.

    A number from the environment applies to each rank, as in torch. So does a number that torch
    derives from cores that are reserved for the rank.
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
    """Return the agreement on the current lookup of a graph."""
    import torch.distributed as dist

    try:
        # Not the key: it may contain this rank's device or its position in a mesh.
        graph = hashlib.sha256("\n".join(_lines(gm, inputs)).encode()).hexdigest()[:32]
        name = f"s3cache/{graph}/{next(_numbers[graph])}"
        return Agreement(internals.default_store.get()(), name, dist.get_world_size())
    except Exception:
        logger.warning("ranks cannot agree: a miss %s", pointer("ranks"), exc_info=True)
        return Agreement(None, "", 0)


def _lines(gm: GraphModule, inputs: Sequence[object]) -> Iterator[str]:
    """Yield lines that are equal on two ranks if and only if they compile the same graph."""
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
