"""A job: graphs of which each shows something that an entry describes."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def _views(x: Any, y: Any) -> Any:
    return x @ y, x.t()


def _intermediate(x: Any, y: Any) -> Any:
    product = x @ y
    return product.t(), product[0]


def _mutation(x: Any, y: Any) -> Any:
    x.copy_(y)
    return x @ y


def _product(x: Any, y: Any) -> Any:
    return x @ y


def views(url: str) -> dict[str, str]:
    """The object that the entry of each graph is in."""
    import torch
    from torch.testing._internal.two_tensor import TwoTensor

    import s3cache

    def square() -> Any:
        return torch.ones(4, 4)

    long = torch.ones(7, 4)
    torch._dynamo.mark_dynamic(long, 0)
    graphs = {
        "views": (_views, square(), square()),
        "intermediate": (_intermediate, square().requires_grad_(), square()),
        "mutation": (_mutation, square(), square()),
        "subclass": (_product, TwoTensor(square(), square()), square()),
        "training": (_product, square().requires_grad_(), square()),
        "dynamic": (_product, long, square()),
    }
    remote = Path(url.removeprefix("file://").partition("?")[0]) / "objects"
    objects: dict[str, str] = {}
    with s3cache.enabled(url) as cache:
        for name, (function, *arguments) in graphs.items():
            torch._dynamo.reset()
            out = torch.compile(function)(*arguments)
            out = out[0] if isinstance(out, tuple) else out
            if out.requires_grad:
                out.sum().backward()
            cache.flush()
            for path in remote.rglob("*.*"):
                if str(path) not in objects.values():
                    assert name not in objects, name
                    objects[name] = str(path)
    return objects
