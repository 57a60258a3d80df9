"""torch under torchrun: FSDP2 with each block sharded and compiled."""

import torch
from small_ranks import Block, begin, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

rank, mesh = begin(), init_device_mesh("cpu", (2,))
model = torch.nn.Sequential(Block(), Block())
for block in model:
    block.compile()
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(rank)
train(model, optimizer, torch.randn(3, 4, 64))
