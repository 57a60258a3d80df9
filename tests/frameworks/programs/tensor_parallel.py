"""torch under torchrun: tensor parallelism, linear layers split by columns and rows."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

dist.init_process_group("gloo")
rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
torch.manual_seed(0)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(64, 128), torch.nn.Linear(128, 64)

    def forward(self, x):
        return x + self.outer(torch.nn.functional.gelu(self.inner(x)))


model = Block()
parallelize_module(model, mesh, {"inner": ColwiseParallel(), "outer": RowwiseParallel()})
compiled = torch.compile(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for x in torch.randn(3, 4, 64):
    loss = compiled(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("loss", rank, loss.item().hex())
dist.destroy_process_group()
