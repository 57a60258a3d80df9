"""Jobs that compile while torch writes its trace, and while its profiler records."""

from __future__ import annotations

from typing import Any


def compiled(url: str, to_the_end: bool) -> dict[str, Any]:
    """One call under the profiler: names of the events that it saw of s3cache.

    Args:
        to_the_end: leave s3cache on, so that the upload is that of the exit.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    import s3cache

    def function(x: Any) -> Any:
        return x.sin() @ x

    cache = s3cache.enable(url)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        torch.compile(function)(torch.ones(4, 4))
    if not to_the_end:
        cache.flush(60)
        s3cache.disable()
    names = {event.name for event in profiled.events()}
    return {"profiled": sorted(names & {"s3cache.lookup", "s3cache.save"})}
