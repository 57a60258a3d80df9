"""Jobs that use torch's own remote caches."""

from __future__ import annotations

import types
from typing import Any

import torch


def winner(device: str) -> dict[str, Any]:
    """Look up the best configuration of a kernel, then save four warps as the best."""
    cuda: Any = torch.cuda
    cuda.is_available = lambda: bool(device)
    cuda.current_device = lambda: 0
    cuda.get_device_properties = lambda _: types.SimpleNamespace(
        name=device, major=9, minor=0, multi_processor_count=132, total_memory=80
    )
    from torch._inductor.remote_cache import RemoteAutotuneCache, create_cache

    import s3cache

    cache = create_cache("hash-of-configurations", False, None, RemoteAutotuneCache.__name__)
    assert cache is not None
    found: Any = cache.get("kernel")
    cache.put("kernel", {"num_warps": 4})
    enabled = s3cache.active()
    counts = None if enabled is None else enabled.stats().kinds.get("torch")
    hits = 0 if counts is None else sum(counts.hits.values())
    return {"found": found and found["num_warps"], "hits": hits}


def sizes() -> int:
    """Call a compiled function with two sizes; return how often Dynamo compiled it."""
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    compiled = torch.compile(lambda x: x.sin() + 1, backend=counter)
    for size in (3, 5):
        compiled(torch.ones(size))
    return int(counter.frame_count)


def backends() -> list[bool]:
    """Return for each of torch's caches whether s3cache has left it unchanged."""
    from torch._inductor import remote_cache

    names = ("RemoteAutotuneCache", "RemoteBundledAutotuneCache", "RemoteDynamoPGOCache")
    return [getattr(remote_cache, name).backend_override_cls is None for name in names]
