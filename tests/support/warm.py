"""Real ``torch.compile`` runs on two machines that share a bucket: one cold, one warm.

:class:`WarmStart` is a contract like the stores': a folder with a server subclasses it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support.machines import Machine
from tests.support.marks import slow

if TYPE_CHECKING:
    from pathlib import Path

    from s3cache.store import S3Options

__all__ = ["WarmStart", "train"]

WIDTH = 24


class WarmStart:
    """The second machine compiles nothing, and its losses are the first one's bit for bit.

    A subclass has a fixture ``place``: an empty prefix of a bucket.
    """

    @pytest.mark.timeout(900)
    def test_plain_training(self, place: S3Options, tmp_path: Path) -> None:
        cold, warm = _both(place, tmp_path, "plain")
        assert warm["hits"] == cold["misses"] == 1

    @slow
    @pytest.mark.timeout(900)
    def test_ddp(self, place: S3Options, tmp_path: Path) -> None:
        cold, warm = _both(place, tmp_path, "ddp")
        assert warm["hits"] == cold["misses"] > 1

    @slow
    @pytest.mark.timeout(900)
    def test_compiled_autograd(self, place: S3Options, tmp_path: Path) -> None:
        cold, warm = _both(place, tmp_path, "compiled autograd")
        # The captured backward pass hits as a whole, the forward in its half.
        assert cold["misses"] == 2
        assert (warm["hits"], warm["half_hits"]) == (1, 1)


def _both(place: S3Options, root: Path, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    environment = {
        "AWS_ACCESS_KEY_ID": str(place.access_key),
        "AWS_SECRET_ACCESS_KEY": str(place.secret_key),
    }
    url = f"s3://{place.bucket}/{place.prefix}"
    options = {"endpoint_url": place.endpoint_url, "region": place.region}
    cold, warm = (
        Machine(root / name, **environment).run("tests.support.warm:train", kind, url, options)
        for name in ("cold", "warm")
    )
    assert cold.result["lowered"] > 0
    assert cold.result["remaining"] == warm.result["remaining"] == 0
    assert warm.result["lowered"] == 0
    assert warm.result["losses"] == cold.result["losses"]
    return cold.result, warm.result


# -- the job


def train(kind: str, url: str, options: dict[str, str]) -> dict[str, Any]:
    """Three steps of a small network, and what the cache counted."""
    import torch

    import s3cache
    from tests.support.watch import lowerings

    lowered = lowerings()

    class Network(torch.nn.Module):
        """One of our own: Dynamo skips what only calls modules of torch's, within DDP."""

        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            return self.outer(torch.nn.functional.gelu(self.inner(x)))

    torch.manual_seed(0)
    network: Any = Network()
    if kind == "ddp":
        from torch._C._distributed_c10d import HashStore

        torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
        torch.distributed.__dict__["_DEFAULT_FIRST_BUCKET_BYTES"] = 512  # several of a small model
        network = torch.nn.parallel.DistributedDataParallel(network, bucket_cap_mb=0.0005)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    losses = []
    settings: Any = options
    with s3cache.enabled(url, **settings) as cache:
        compiled = torch.compile(network)
        for step in range(3):
            x = torch.linspace(-1, 1 + step, 4 * WIDTH).reshape(4, WIDTH)
            loss = compiled(x).square().mean()
            if kind == "compiled autograd":
                with torch._dynamo.compiled_autograd._enable(torch.compile()):
                    loss.backward()
            else:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        remaining = cache.flush(60).remaining
        stats = cache.stats()
    return {
        "losses": losses,
        "lowered": len(lowered),
        "remaining": remaining,
        "hits": sum(stats.hits.values()),
        "misses": sum(stats.misses.values()),
        "half_hits": sum(stats.fx.hits.values()),
    }
