"""A program that must not compile: ``on_miss=error``."""

from __future__ import annotations

from typing import Any

import torch

import s3cache


def step(url: str, sizes: list[int], on_miss: str, operator: str = "sin") -> list[Any]:
    """Run a training step of each size; return the sum of its gradient, or its error."""
    found: list[Any] = []
    with s3cache.enabled(url, on_miss=on_miss) as cache:  # type: ignore[arg-type]

        @torch.compile(dynamic=False)
        def function(x: Any) -> Any:
            return getattr(torch, operator)(x).cos() * x

        for size in sizes:
            x = torch.linspace(0, 1, size, requires_grad=True)
            try:
                function(x).sum().backward()
                assert x.grad is not None
                found.append(round(float(x.grad.sum()), 4))
            except Exception as exc:
                cause: BaseException | None = exc
                while cause is not None and not isinstance(cause, s3cache.MissError):
                    cause = cause.__cause__ or getattr(cause, "inner_exception", None)
                found.append(str(cause))
        cache.flush(60)
    return found
