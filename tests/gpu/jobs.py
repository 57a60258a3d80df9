"""What machines with a stand-in run. No module here imports torch before ``install`` is called."""

from __future__ import annotations

from typing import Any

from tests.gpu import standin


def mlp() -> dict[str, Any]:
    standin.install()
    import torch
    from torch._dynamo.utils import counters

    import s3cache

    cache = s3cache.enable()
    with standin.tensors(), torch.device("cuda"):
        module = torch.nn.Sequential(
            torch.nn.Linear(128, 256),
            torch.nn.GELU(),
            torch.nn.LayerNorm(256),
            torch.nn.Linear(256, 8),
        )
        torch.compile(module)(torch.randn(16, 128)).sum().backward()
    cache.flush(60)
    return dict(standin.counts) | {
        k: dict(v) for k, v in counters.items() if k in ("aot_autograd", "inductor")
    }
