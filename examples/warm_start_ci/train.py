"""A small training job: it compiles a model, takes some steps and prints the loss."""

import argparse

import torch
from torch import nn

import s3cache


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    steps = parser.parse_args().steps

    s3cache.enable()  # the environment says where: S3CACHE_URL=s3://bucket/prefix
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    @torch.compile
    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(batch).square().mean()
        return loss

    for step in range(steps):
        loss = loss_of(torch.randn(16, 32))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
