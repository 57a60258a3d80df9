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
