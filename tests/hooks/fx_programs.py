"""Jobs with graphs that only the second level can serve, and with graphs for both levels."""

from __future__ import annotations

import errno
import os
from typing import Any

import torch

import s3cache
from tests.hooks.graphs import remote_of
from tests.hooks.jobs import account, machine_here
from tests.hooks.switches import compiled
from tests.support.watch import lowerings, processes


def waved(x: Any, y: Any) -> Any:
    """A graph with a kernel."""
    return (x @ y).sin() * 2


@torch._dynamo.allow_in_graph
def opaque(x: Any) -> Any:
    return x.cos() * 3


def unknown(x: Any, y: Any) -> Any:
    """A graph that cannot be cached as a whole: ``opaque`` is not registered."""
    return opaque(x @ y)


def _runs(
    function: Any, *, grad: bool = False, dynamic: bool | None = None, sizes: tuple[int, ...] = (6,)
) -> bool:
    """Compile from scratch and run the forward only; return whether it equals eager mode."""
    torch._dynamo.reset()
    run = torch.compile(function, dynamic=dynamic)
    same = True
    for size in sizes:
        x = torch.linspace(-1, 1, size * size).reshape(size, size).requires_grad_(grad)
        y = x.detach().t().contiguous()
        same &= torch.allclose(run(x, y), function(x, y))
    return same


WAYS = {
    "forward": lambda: _runs(waved, grad=True),
    "unknown": lambda: _runs(unknown),
    "unknown forward": lambda: _runs(unknown, grad=True),
    # The guards of one entry allow both sizes.
    "unknown sizes": lambda: _runs(unknown, dynamic=True, sizes=(5, 7)),
}


def each_way(url: str, names: list[str]) -> dict[str, Any]:
    """Compile in each way; return the outcomes and the counts."""

    lowered, started = lowerings(), processes()
    found = {}
    with s3cache.enabled(url) as cache:
        for name in names:
            before = _second(cache)
            lowered.clear()
            right = WAYS[name]()
            after = _second(cache)
            added = {each: count - before[each] for each, count in after.items()}
            found[name] = {"right": right, "lowered": len(lowered), **added}
        cache.flush()
        return {"ways": found, "started": started, **account(cache)}


def scaled(x: Any) -> Any:
    return (x.sin() * 2).exp()


def rescaled(x: Any) -> Any:
    """Another graph with the same FX graphs as ``scaled``."""
    return torch.exp(torch.mul(torch.sin(x), 2))


@torch._inductor.config.patch(fallback_by_default=True)  # so that no C++ is compiled
def share_a_forward(url: str) -> dict[str, Any]:
    """Run a forward alone, then both directions of a graph with the same forward; run it again."""
    lowered = lowerings()
    with machine_here(url, "writer") as cache:
        torch.compile(scaled)(torch.ones(4, requires_grad=True))
        torch.compile(rescaled)(torch.ones(4, requires_grad=True)).sum().backward()
        cache.flush()
        found = {"lowered": len(lowered), "second": _second(cache)}
    lowered.clear()
    with machine_here(url, "reader"):
        torch.compile(scaled)(torch.ones(4, requires_grad=True))
    return {**found, "lowered again": len(lowered)}


def _second(cache: Any) -> dict[str, int]:
    """Return the counts of the second level."""
    level = cache.stats().fx
    return {
        "hits": sum(level.hits.values()),
        "misses": sum(level.misses.values()),
        "saved": level.saved,
        "contained": level.contained,
        "bypassed": level.bypassed,
    }


def train(url: str) -> dict[str, Any]:
    lowered = lowerings()
    with s3cache.enabled(url) as cache:
        right = compiled(6, grad=True) and compiled(8)
        cache.flush()
        requests = {verb: each.calls for verb, each in cache.stats().remote.items() if each.calls}
        return {
            "right": right,
            "lowered": len(lowered),
            "second": _second(cache),
            "requests": requests,
            **account(cache),
        }


def at_both_levels(url: str, names: list[str]) -> dict[str, Any]:
    """Train, and compile graphs that only the second level serves."""
    return {"trained": train(url), "ways": each_way(url, names)}


def without_room(url: str, torchs: bool) -> dict[str, Any]:
    """Look a graph up twice on a second machine; at first, its disk is full.

    Args:
        torchs: Fail one write of a file of torch; otherwise, fail for all temporary directories.
    """
    import tempfile
    from unittest.mock import patch

    from torch._inductor import codecache

    refused = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    write, refusals = codecache.write_atomic, [refused]

    def write_atomic(path: str, *args: Any, **kwargs: Any) -> Any:
        if refusals and path.endswith(".py"):
            raise refusals.pop()
        return write(path, *args, **kwargs)

    without = (
        patch.object(codecache, "write_atomic", write_atomic)
        if torchs
        else patch.object(tempfile, "mkdtemp", side_effect=refused)
    )
    with machine_here(url, "writer") as cache:
        right = _runs(waved)
        cache.flush()
    before = {path: path.read_bytes() for path in remote_of(url).rglob("*") if path.is_file()}
    with machine_here(url, "full") as cache:
        with without:
            right &= _runs(waved)
        first = cache.stats()
        right &= _runs(waved)
        cache.flush()
        stats = cache.stats()
    reasons = [{str(name): count for name, count in each.misses.items()} for each in (first, stats)]
    after = {path: path.read_bytes() for path in before}
    return {
        "right": right,
        "misses": reasons,
        "hits": sum(stats.hits.values()),
        "untouched": before == after,
    }


def matmul_of_ours(x: Any, y: Any, *, out: Any) -> None:
    """A product that Inductor may choose, and registers under this name while it lowers."""
    torch.mm(x, y, out=out)


def external_matmul(url: str) -> dict[str, Any]:
    """Compile a graph that calls ``matmul_of_ours``."""
    options = {
        "max_autotune_gemm": True,
        "max_autotune_gemm_backends": "TRITON",  # which has none for a processor
        "external_matmul": [matmul_of_ours],
    }
    s3cache.register_cacheable(matmul_of_ours, version="1")
    with s3cache.enabled(url) as cache, torch._inductor.config.patch(options):
        right = _runs(waved)
        cache.flush()
        return {"right": right, **account(cache)}


class Counter:
    """Telemetry that counts the calls of a function of torch, by type of the argument."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.calls: dict[str, int] = {}
        self.total = 0

    def __get__(self, value: Any, kind: type) -> Any:
        return lambda *args, **kwargs: self(value, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.total += 1
        name = type(args[0]).__name__
        self.calls[name] = self.calls.get(name, 0) + 1
        return self.function(*args, **kwargs)


def observed(url: str) -> dict[str, Any]:
    """Compile two graphs on two machines, in a program that counts calls while tracing."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    lowered, found = lowerings(), []
    FakeTensorMode.dispatch = Counter(FakeTensorMode.dispatch)  # type: ignore[method-assign]
    for name in ("writer", "reader"):
        lowered.clear()
        with machine_here(url, name) as cache:
            right = _runs(lambda x, y: x @ y) and _runs(lambda x, y: (x @ y) @ y)
            cache.flush()
            found.append({"right": right, "lowered": len(lowered), **account(cache)})
    return {"machines": found}
