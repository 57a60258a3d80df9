"""Jobs that compile while torch writes its trace, and while its profiler records."""

from __future__ import annotations

from typing import Any


def compiled(url: str) -> dict[str, Any]:
    """A call under the profiler, and then a forward that no backward follows.

    Returns names of the events of s3cache that the profiler saw.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    import s3cache

    def function(x: Any) -> Any:
        return x.sin() @ x

    with s3cache.enabled(url) as cache:
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            torch.compile(function)(torch.ones(4, 4))
        torch.compile(lambda x: x.cos() @ x)(torch.ones(4, 4, requires_grad=True))
        cache.flush(60)
    names = {event.name for event in profiled.events()}
    return {"profiled": sorted(names & {"s3cache.lookup", "s3cache.save"})}


def captured(url: str) -> dict[str, Any]:
    """Go backward under compiled autograd, with and without Dynamo's stance ``force_eager``.

    Args:
        url: of the cache; ``""`` for torch alone.
    """
    import contextlib

    import torch
    from torch._dynamo.utils import counters

    import s3cache

    def lookups() -> int:
        cache = s3cache.active()
        return 0 if cache is None else cache.stats().lookups

    with s3cache.enabled(url) if url else contextlib.nullcontext():
        x = torch.ones(3, 3, requires_grad=True)
        with torch._dynamo.compiled_autograd._enable(torch.compile()):
            (x @ x).sum().backward()
            compiled = dict(counters["compiled_autograd"]), lookups()
            with torch.compiler.set_stance("force_eager"):
                (x @ x).sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, torch.full((3, 3), 12.0))
        return {"compiled": compiled, "eager": (dict(counters["compiled_autograd"]), lookups())}
