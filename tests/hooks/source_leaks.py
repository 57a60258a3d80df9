"""Programs with a word at the end of their lines; a test searches the entries for it."""

from __future__ import annotations

from typing import Any

import torch

WORD = "confidential"


def share(url: str) -> dict[str, Any]:
    """Compile graphs; return the counts."""
    from torch.utils.checkpoint import checkpoint

    import s3cache
    from tests.hooks.jobs import account

    @torch.library.custom_op("telling::halved", mutates_args=())
    def halved(x: torch.Tensor) -> torch.Tensor:
        return x / 2  # confidential

    @halved.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)  # confidential

    def trained(x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.layer_norm(x, (8,))  # confidential
        return (y.relu() @ y.t()).sum()  # confidential

    def recomputed(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(trained, x.sin(), use_reentrant=False)  # confidential

    def called(x: torch.Tensor) -> torch.Tensor:
        return halved(x.cos()) * 3  # confidential

    def chosen(x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))  # confidential

    def mutated(x: torch.Tensor) -> torch.Tensor:
        return x.add_(1) * 2  # confidential

    x = torch.linspace(-1, 1, 32).view(4, 8)
    with s3cache.enabled(url, local=False) as cache:
        torch.compile(trained)(x.clone().requires_grad_()).backward()
        torch.compile(recomputed)(x.clone().requires_grad_()).backward()
        torch.compile(trained, dynamic=True)(x.clone().requires_grad_()).backward()
        compiled = torch.compile(mutated)
        for size in (4, 3):  # another process need not see the first size
            compiled(x[:size].clone())
        for function in (called, chosen, mutated):
            torch.compile(function)(x.clone())
        # The backward never runs: the forward is shared alone.
        torch.compile(lambda x: x.exp().sum())(x.clone().requires_grad_())  # confidential
        assert not cache.flush(60).remaining
        return {**account(cache), "second level": sum(cache.stats().fx.hits.values())}
