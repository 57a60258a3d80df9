"""Ranks that wait for each other while they compile, and graphs that DDPOptimizer has split."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import cast

from s3cache.torch_api._declare import AnyFunction, Fields, Flag, Internal, Shape
from s3cache.torch_api.dynamo import current_tracing_context
from s3cache.torch_api.protocols import FirstCallWrapper, RuntimeMetadata, SharedStore

#: This feature has a fallback of its own where it is used.
RANKS = "hits where ranks must agree"

# -- ranks

_sync_decisions = Flag("torch._functorch.config:_sync_decision_cross_ranks")
_sync_lookups = Flag(
    "torch._functorch.config:_sync_cache_decision_cross_ranks",
    since=(2, 15),
    instead="nothing: a hit beside a miss hangs",
)
_tunes_together = Flag("torch._inductor.config:distributed_max_autotune_gemm")
# Both compare estimates, or with ``spmd_check`` graphs, across ranks.
_schedules_overlap = Flag(
    "torch._inductor.config:aten_distributed_optimizations.enable_overlap_scheduling"
)
_reorders_overlap = Flag("torch._inductor.config:reorder_for_compute_comm_overlap")
_traces_together = Flag("torch._dynamo.config:enable_compiler_collectives")
default_store: Internal[Callable[[], SharedStore]] = Internal(
    "torch.distributed.distributed_c10d:_get_default_store", feature=RANKS
)
Shape("torch._C._distributed_c10d:Store", SharedStore, feature=RANKS)


def ranks_must_agree() -> bool:
    """Return whether ranks of this job exchange data while they compile: all have to, or none.

    Not where torch's own lookups see to it already.
    """
    together = (
        _sync_decisions.get()
        or _tunes_together.get()
        or _schedules_overlap.get()
        or _reorders_overlap.get()
        or _traces_together.get()
    )
    if not together or _sync_lookups.find():
        return False
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


# -- first calls on fake tensors (DDPOptimizer)

_FAKIFIED = "torch._functorch._aot_autograd.runtime_wrappers:FakifiedOutWrapper"

answer_first_call = AnyFunction(f"{_FAKIFIED}.post_compile")
Shape(_FAKIFIED, FirstCallWrapper)
Fields("torch._dynamo.backends.distributed:DDPOptimizerContext", "curr_bucket metadata_per_bucket")


def is_first_call_fake() -> bool:
    """Return whether the graph that is compiled now answers its first call with fake tensors."""
    context = current_tracing_context.get()()
    return context is not None and context.fakify_first_call


@contextlib.contextmanager
def first_calls_unasked() -> Iterator[None]:
    """Hide from torch, in the block, that first calls are to be on fake tensors."""
    context = current_tracing_context.get()()
    if context is None or not context.fakify_first_call:
        yield
        return
    context.fakify_first_call = False
    try:
        yield
    finally:
        context.fakify_first_call = True


def stand_in_for_metadata() -> None:
    """Have torch find metadata of a graph that is not compiled: DDPOptimizer insists on some."""
    context = current_tracing_context.get()()
    if context is not None and context.fakify_first_call and context.fw_metadata is None:
        context.fw_metadata = cast("RuntimeMetadata", object())
