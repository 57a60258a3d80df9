"""Functions that machines call. This module imports little: each machine imports it again."""

from __future__ import annotations

import os
from typing import Any


def train(url: str) -> list[float]:
    """Return the results of a job with all ways of caching in torch: no whole graph needs to hit.

    It has batches of two sizes, a forward without a backward, and a compiled backward.
    """
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


def double(numbers: list[int], by: int = 2) -> dict[str, Any]:
    return {"doubled": [number * by for number in numbers], "in": os.getpid()}


def give_a_set() -> set[int]:
    return {1}


def use_a_cache(remote: str) -> None:
    """Save and look up entries in a cache that is enabled for torch and then disabled."""
    import s3cache
    from s3cache import frame

    with s3cache.enabled(remote) as cache:
        cache.save("abc", frame.encode(kind="test", key="abc", sections={"body": b"x"}))
        cache.lookup("abc")
        cache.lookup("absent")


def use_the_bucket() -> str:
    """List and put in the store that the environment names."""
    import asyncio

    from s3cache.store import open_store

    async def use() -> str:
        store = open_store(os.environ["S3CACHE_URL"])
        before = [info.key async for info in store.list()]
        await store.put("key", b"content")
        after = [info.key async for info in store.list()]
        await store.aclose()
        return f"{before} {after}"

    return asyncio.run(use())
