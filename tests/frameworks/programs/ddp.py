"""torch under torchrun: DDP with a first bucket of 1 MB, which splits the graph."""

import torch
from small_ranks import begin, train
from torch.nn.parallel import DistributedDataParallel

rank = begin()


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(512, 512) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return x


model = torch.compile(DistributedDataParallel(Network()))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(rank)
train(model, optimizer, torch.randn(3, 4, 512))
