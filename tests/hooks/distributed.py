"""Jobs with a process group, of one or several processes.

A job that needs no second process has a group of one process: DDPOptimizer splits graphs there
too.
"""

from __future__ import annotations

import functools
import importlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch._functorch import partitioners
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import s3cache
from s3cache.frame import decode
from tests.hooks.jobs import account, machine_here

WIDTH = 16


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return x + self.outer(torch.nn.functional.gelu(self.inner(x)))


def _network() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(Block(), Block())


class Checkpointed(torch.nn.Module):
    """The same network; the backward recomputes its second block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = _network()

    def forward(self, x: Any) -> Any:
        first, second = self.blocks
        return checkpoint(second, first(x), use_reentrant=False)


# How each way of training differs from the plain one.
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sizes that change": {"sizes": (3, 5, 7)},
    "dynamic sizes": {"compile": {"dynamic": True}},
    "unused parameters": {"ddp": {"find_unused_parameters": True}},
    "checkpointing": {"make": Checkpointed},
    "compiled inside": {"inside": True},
}


def _train(way: dict[str, Any]) -> list[Any]:
    """Return the losses and the last gradients of three steps."""
    network = way.get("make", _network)()
    if way.get("inside"):
        network.compile()
    run = DistributedDataParallel(network, bucket_cap_mb=0.0005, **way.get("ddp", {}))
    function = run if way.get("inside") else torch.compile(run, **way.get("compile", {}))
    optimizer = torch.optim.SGD(run.parameters(), lr=0.1)
    seen: list[Any] = []
    for step, size in enumerate(way.get("sizes", (4, 4, 4))):
        x = torch.linspace(-1, step + 1, size * WIDTH).reshape(size, WIDTH)
        loss = function(x).square().mean()
        loss.backward()
        seen.append(loss.item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return [*seen, [each.grad.tolist() for each in run.parameters() if each.grad is not None]]


def _small_buckets() -> None:
    """Make the first bucket small too, so that a small model is split into several graphs."""
    dist.__dict__["_DEFAULT_FIRST_BUCKET_BYTES"] = 512


def _init_group_of_one() -> None:
    """Make a process group of this process alone."""
    _small_buckets()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)


def train(url: str, names: list[str]) -> list[dict[str, Any]]:
    """Train in each way on two machines, with a remote for each way; return the results."""
    _init_group_of_one()
    machines: list[dict[str, Any]] = [{}, {}]
    for number, results in enumerate(machines):
        for name in names:
            remote = f"{url}/{name.replace(' ', '-')}?create=1"
            with machine_here(remote, str(number), local_dir=None, local=False) as cache:
                seen = _train(WAYS[name])
                assert not cache.flush(60).remaining
                results[name] = {"seen": seen, **account(cache)}
    return machines


def without_each_entry(remote: str, scratch: str) -> dict[str, Any]:
    """Train from copies of ``remote`` that each lack one graph, and then without a cache."""
    _init_group_of_one()
    results = {}
    files = [path for path in Path(remote, "objects").rglob("*") if path.is_file()]
    entries = sorted(each for each in files if decode(each.read_bytes()).header.kind == "aot")
    for index, entry in enumerate(entries):
        copy = Path(scratch, str(index))
        shutil.copytree(remote, copy)
        (copy / entry.relative_to(remote)).unlink()
        torch.compiler.reset()
        with s3cache.enabled(f"file://{copy}", local=False) as cache:
            results[str(index)] = {"seen": _train({}), **account(cache)}
    torch.compiler.reset()
    with torch._functorch.config.patch(enable_autograd_cache=False):
        results["torch alone"] = {"seen": _train({})}
    return results


# -- two processes


def _data_parallel() -> Callable[[Any], Any]:
    return torch.compile(DistributedDataParallel(_network(), bucket_cap_mb=0.0005))


def _tensor_parallel() -> Callable[[Any], Any]:
    mesh = init_device_mesh("cpu", (2,))
    assert hash(mesh)  # the mesh keeps its hash, which differs between processes
    network = _network()
    for block in network:
        parallelize_module(block, mesh, {"inner": ColwiseParallel(), "outer": RowwiseParallel()})
    return torch.compile(network)


def _fully_sharded() -> Callable[[Any], Any]:
    network = _network()
    for block in network:
        fully_shard(block)
    return torch.compile(fully_shard(network))


KINDS = {"ddp": _data_parallel, "tp": _tensor_parallel, "fsdp": _fully_sharded}


def _avoid_deadlock() -> None:
    """Let torch's partitioner ask other ranks without the GIL.

    AOTAutograd calls it under the Python dispatcher, which takes the GIL for each operator. gloo's
    thread holds its queue while it waits for the GIL, to free the last operator's tensors: a job
    without s3cache hangs as well, at one compile in about fifty.
    """
    ask = partitioners._sync_decision_cross_ranks

    @functools.wraps(ask)
    def freely(*arguments: Any) -> Any:
        with torch._C._DisablePythonDispatcher():
            return ask(*arguments)

    partitioners.__dict__["_sync_decision_cross_ranks"] = freely
    s3cache.register_cacheable(freely, version="1")  # otherwise graphs are not cached


def one_rank(kind: str, url: str, *options: str) -> dict[str, Any]:
    """Train as one rank; return its losses and counts.

    Args:
        options: Options of torch to set to true, such as ``"torch._functorch.config:name"``.
    """
    torch.set_num_threads(1)
    for option in options:
        module, _, name = option.partition(":")
        setattr(importlib.import_module(module), name, True)
    _avoid_deadlock()
    _small_buckets()
    dist.init_process_group("gloo")
    with s3cache.enabled(url) as cache:
        function = KINDS[kind]()
        losses = []
        for step in range(2):
            # Tensor-parallel ranks work on the same batch.
            own = 0 if kind == "tp" else dist.get_rank()
            x = torch.linspace(-1, step + own + 1, 4 * WIDTH).reshape(4, WIDTH)
            loss = function(x).square().mean()
            loss.backward()
            losses.append(loss.item())
        assert not cache.flush(60).remaining
        stats = cache.stats()
        counts = stats.features["single_flight"]
        shared = {"fx_hits": sum(stats.fx.hits.values())}
        shared |= {name: int(counts[name]) for name in ("claimed", "waits")}
        result = {"losses": losses, "uploaded": cache.stats().uploaded, **shared, **account(cache)}
    dist.barrier()
    dist.destroy_process_group()
    return result
