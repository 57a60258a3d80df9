"""A job with all ways of caching in torch: no whole graph needs to hit."""

from __future__ import annotations

from typing import Any


def train(url: str) -> list[float]:
    """Return the result of each part: batches of two sizes, a lone forward, a compiled backward."""
    import torch

    import s3cache

    s3cache.enable(url)
    torch.manual_seed(0)
    network = torch.nn.Linear(8, 4)

    @torch.compile
    def loss_of(batch: Any) -> Any:
        return (network(batch) * 2).square().mean()

    found = []
    for size in (16, 16, 6):  # the last batch is smaller
        loss = loss_of(torch.ones(size, 8))
        loss.backward()
        found.append(loss.item())

    @torch.compile
    def score(batch: Any) -> Any:
        return network(batch).cos().sum()

    found.append(score(torch.ones(3, 8)).item())  # with gradients enabled, but without a backward

    x = torch.linspace(-1, 1, 6).requires_grad_()
    out = torch.compile(lambda x: x * x * 3)(x)
    with torch._dynamo.compiled_autograd._enable(torch.compile()):
        out.sum().backward()
    assert x.grad is not None
    return [*found, x.grad.sum().item()]


def train_without_caches(url: str) -> list[float]:
    """Do the same with torch's caches for graphs off."""
    import torch

    with torch._inductor.config.patch(fx_graph_cache=False):
        return train(url)


def train_none(url: str) -> list[float]:
    """Enable the cache, and compile nothing."""
    import s3cache

    s3cache.enable(url)
    return []
