"""A job of two ranks: programs with code that may contain the number of the rank.

Each result is compared with eager mode. The graph of the program with its own process group
contains the group's name (pytorch 189330). Tensors that name a device mesh (188390) are in
``test_ranks.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._inductor import config

import s3cache
from tests.hooks.jobs import account

Program = Callable[[Any, Any], Any]


def gathered(x: Any, group: Any) -> Any:
    """Gather two tensors; a pass of Inductor may merge the calls (pytorch 188332)."""
    first = functional.all_gather_single(x * 2, 0, group)
    second = functional.all_gather_single(x + 1, 0, group)
    return first.sin() + second.cos()


def reduced(x: Any, group: Any) -> Any:
    """Reduce over all ranks; the code calls the traced collectives."""
    return functional.all_reduce(x * 2, "sum", group) + 1


def times_rank(x: Any, _: Any) -> Any:
    """Use the rank as a number."""
    return x * (dist.get_rank() + 1)


def within(x: Any, _: Any, size: int = 4) -> Any:
    """Mask numbers outside this rank's part of a vocabulary (torchtitan 4730)."""
    begin = size * dist.get_rank()
    mask = (x < begin) | (x >= begin + size)
    return torch.where(mask, 0.0, x - begin)


#: By name: the program, and Inductor's options for its compile.
PROGRAMS: dict[str, tuple[Program, dict[str, Any]]] = {
    "all-gathers that are merged": (gathered, {"bucket_all_gathers_fx": "all"}),
    "all-gathers": (gathered, {}),
    "all-reduce": (reduced, {}),
    "the rank as a number": (times_rank, {}),
    "a part of a vocabulary": (within, {}),
}


def outcomes(url: str) -> dict[str, Any]:
    """Return the outcome of each program on this rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    own = [dist.new_group([each]) for each in range(dist.get_world_size())][rank]
    groups = dict.fromkeys(PROGRAMS, dist.group.WORLD)
    x = torch.arange(8.0) + rank
    found = {}
    for name, (program, options) in {**PROGRAMS, "a group of its own": (reduced, {})}.items():
        group = groups.get(name, own)
        torch.compiler.reset()
        with config.patch(options), s3cache.enabled(url) as cache, torch.no_grad():
            compiled = torch.compile(program, fullgraph=True)(x, group)
            is_right = torch.allclose(compiled, program(x, group))
            assert not cache.flush(60).remaining
            found[name] = {"is_right": is_right, **account(cache)}
            explained = s3cache.explain().explanations
            found[name]["why"] = [
                str(each.record.rejected) for each in explained if each.record.kind == "aot"
            ]
    dist.barrier()
    dist.destroy_process_group()
    return found
