"""torch under torchrun: tensor parallelism, linear layers split by columns and rows."""

import torch
from small_ranks import Block, begin, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

begin()
model, mesh = Block(), init_device_mesh("cpu", (2,))
parallelize_module(model, mesh, {"inner": ColwiseParallel(), "outer": RowwiseParallel()})
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
train(torch.compile(model), optimizer, torch.randn(3, 4, 64))
