"""The names that programs with distributed tensors find in their modules besides."""

from __future__ import annotations

from typing import Any

from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def mesh(shape: tuple[int, ...], names: Any = None) -> Any:
    """Return a mesh of this process."""
    if not distributed.is_initialized():
        store = distributed.HashStore()  # type: ignore[attr-defined]
        distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def placed(
    value: Tensor, *placements: Any, shape: tuple[int, ...] = (1,), names: Any = None
) -> Any:
    """Return a distributed tensor of this process."""
    return distribute_tensor(value, mesh(shape, names), placements)


__all__ = [
    "ColwiseParallel",
    "DTensor",
    "Replicate",
    "RowwiseParallel",
    "Shard",
    "mesh",
    "parallelize_module",
    "placed",
]
