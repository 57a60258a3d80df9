"""The job on the picture of a report: in full, only its evaluation, or in full after edits."""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody does

JOB = os.environ["JOB"]


@torch.compiler.allow_in_graph
def normalise(x: torch.Tensor) -> torch.Tensor:
    return x / x.norm()


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.wide = torch.nn.Linear(width, 4 * width)
        self.narrow = torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


torch.manual_seed(0)
model = torch.nn.Sequential(*(Block(64) for _ in range(2)))
optimizer = torch.optim.AdamW(model.parameters())
batch = torch.ones(16, 64)


@torch.compile
def loss_of(x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x).square().mean()


@torch.compile
def accuracy(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((x - y).abs() < 0.5).float().mean()


@torch.compile
def sample(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x / (0.8 if JOB == "edited" else 1.0), -1).cumsum(-1)


@torch.compile
def median(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).sort().values[:, x.shape[1] // 2]


@torch.compile
def ranked(x: torch.Tensor) -> torch.Tensor:
    return normalise(x).sort().values


if JOB != "evaluation":
    for _ in range(3):
        loss_of(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
with torch.no_grad():
    held_out = torch.ones(24 if JOB == "edited" else 16, 64)
    median(held_out)
    accuracy(held_out, held_out + 1)
    sample(batch)
    ranked(batch)
