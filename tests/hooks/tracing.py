"""A job that compiles under torch's trace and profiler, and a reader of that trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def compiled(url: str) -> dict[str, Any]:
    """Call a function under the profiler, and then run a forward without a backward.

    Return the names of the events of s3cache that the profiler saw.
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


def traced(folder: Path) -> list[dict[str, Any]]:
    """Return the structured trace that torch wrote: the head and payload of each line."""
    (file,) = folder.glob("*.log")
    found: list[dict[str, Any]] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("\t"):
            found[-1]["payload"] = found[-1].get("payload", "") + line[1:]
        elif (start := line.find("] {")) >= 0:
            found.append(json.loads(line[start + 2 :]))
    return found
