"""Jobs over graphs that only the second level can serve, and graphs that both come by."""

from __future__ import annotations

import os
import pickle
import signal
from pathlib import Path
from typing import Any

import torch

import s3cache
from s3cache import frame
from tests.hooks.graphs import encoded
from tests.hooks.jobs import account, watch_processes
from tests.hooks.switches import compiled
from tests.support.watch import lowerings


def waved(x: Any, y: Any) -> Any:
    """A graph with a kernel of its own."""
    return (x @ y).sin() * 2


@torch._dynamo.allow_in_graph
def opaque(x: Any) -> Any:
    return x.cos() * 3


def unknown(x: Any, y: Any) -> Any:
    """A graph that cannot be cached as a whole: nothing says what ``opaque`` does."""
    return opaque(x @ y)


def _runs(
    function: Any,
    *,
    grad: bool = False,
    dynamic: bool | None = None,
    sizes: tuple[int, ...] = (6,),
) -> bool:
    """Compile it anew and call it, never going backward; whether it does as eager does."""
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
    # One serves both sizes, by its guards.
    "unknown sizes": lambda: _runs(unknown, dynamic=True, sizes=(5, 7)),
}


def each_way(url: str, names: list[str]) -> dict[str, Any]:
    """What each way of compiling comes to, and the counts."""

    lowered, started = lowerings(), watch_processes()
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


def _second(cache: Any) -> dict[str, int]:
    """The counts of the second level."""
    level = cache.stats().fx
    return {
        "hits": sum(level.hits.values()),
        "misses": sum(level.misses.values()),
        "saved": level.saved,
        "superseded": level.superseded,
        "bypassed": level.bypassed,
    }


def torch_alone() -> int:
    """How many graphs torch lowers for a forward and for an unknown function, without a cache."""
    lowered = lowerings()
    assert WAYS["forward"]()
    assert WAYS["unknown"]()
    return len(lowered)


def train(url: str) -> dict[str, Any]:
    """Whole training steps, of which the second level must leave nothing behind."""
    lowered = lowerings()
    with s3cache.enabled(url) as cache:
        right = compiled(6, grad=True) and compiled(8)
        cache.flush()
        requests = {verb: each.calls for verb, each in cache.stats().remote.items() if each.calls}
        usage = cache.stats().local
        return {
            "right": right,
            "lowered": len(lowered),
            "second": _second(cache),
            "requests": requests,
            "files": 0 if usage is None else usage.files,
            **account(cache),
        }


def die_after_a_forward(url: str) -> None:
    """Compile a forward, and be killed before anything can be uploaded at leisure."""
    s3cache.enable(url)
    assert _runs(waved, grad=True)
    os.kill(os.getpid(), signal.SIGKILL)


def upload_what_others_left(url: str) -> bool:
    with s3cache.enabled(url) as cache:
        return cache.flush(60).complete


def write_and_damage(url: str) -> int:
    """Save a half for each kind of damage, and damage it; every frame stays sound."""
    count = 0
    with s3cache.enabled(url) as cache:
        for size in range(3, 3 + len(DAMAGE)):
            assert _runs(waved, grad=True, sizes=(size,))
        cache.flush()
    remote = Path(url.removeprefix("file://").partition("?")[0]) / "objects"
    paths = sorted(path for path in remote.rglob("*.*") if path.is_file())
    for path, name in zip(paths, DAMAGE, strict=True):
        found = frame.decode(path.read_bytes())
        sections = {each: bytes(found.section(each)) for each in found.names}
        if name == "no kernel":
            del sections[next(each for each in sections if each.startswith("kernel/"))]
        else:
            sections["entry"] = _damaged(name, sections["entry"])
        path.write_bytes(encoded(found, sections))
        count += 1
    return count


DAMAGE = ("no kernel", "no pickle", "another type", "bad code", "bad guards")


def _damaged(name: str, content: bytes) -> bytes:
    if name == "no pickle":
        return b"\x80\x04 is no pickle"
    if name == "another type":
        return pickle.dumps({"current_callable": None})
    graph = pickle.loads(content)
    if name == "bad guards":
        graph.guards_expr = "L['nothing'"
    else:
        graph.cache_key = "c" + "0" * 51
        graph.source_code = "raise RuntimeError('this is no graph')"
    return pickle.dumps(graph)


def read_damaged(url: str) -> dict[str, Any]:
    """Every one of them, and the counts."""
    with s3cache.enabled(url) as cache:
        right = all(_runs(waved, grad=True, sizes=(size,)) for size in range(3, 3 + len(DAMAGE)))
        cache.flush()
        level = cache.stats().fx
        return {
            "right": right,
            "hits": sum(level.hits.values()),
            "misses": {str(reason): count for reason, count in level.misses.items()},
            "saved": level.saved,
        }


def by_hand(url: str) -> dict[str, Any]:
    """A graph compiled without Dynamo, by each function of Inductor's that does it."""
    from torch._inductor import standalone_compile
    from torch.fx.experimental.proxy_tensor import make_fx

    lowered, started, found = lowerings(), watch_processes(), {}
    x, y = (torch.linspace(-1, 1, 36).reshape(6, 6) * sign for sign in (1, -1))
    with s3cache.enabled(url) as cache:
        ways: dict[str, Any] = {
            "compile": torch._inductor.compile,
            "standalone_compile": standalone_compile,
        }
        for name, compile_it in ways.items():
            lowered.clear()
            run = compile_it(make_fx(waved)(x, y), [x, y])
            came = run(x, y)
            came = came[0] if isinstance(came, (list, tuple)) else came
            right = torch.allclose(came, waved(x, y))
            found[name] = {"right": right, "lowered": len(lowered), "second": _second(cache)}
        cache.flush()
        return {"ways": found, "started": started, **account(cache)}


def without_room(url: str, number: int, torchs: bool) -> dict[str, Any]:
    """A graph that is there, twice: first while a file cannot be written.

    Args:
        number: the error that the system answers with; 0 for none.
        torchs: whether it is a file of torch's, and for a moment; else any temporary directory.
    """
    import tempfile
    from unittest.mock import patch

    from torch._inductor import codecache

    refused = OSError(number, os.strerror(number))
    write, refusals = codecache.write_atomic, [refused] if number else []

    def write_atomic(path: str, *args: Any, **kwargs: Any) -> Any:
        if refusals and path.endswith(".py"):
            raise refusals.pop()
        return write(path, *args, **kwargs)

    without = (
        patch.object(codecache, "write_atomic", write_atomic)
        if torchs
        else patch.object(tempfile, "mkdtemp", side_effect=refused)
    )
    with s3cache.enabled(url) as cache:
        with without:
            starved = _runs(waved)
        first = cache.stats()
        right = starved and _runs(waved)
        cache.flush()
        stats = cache.stats()
    reasons = [{str(name): count for name, count in each.misses.items()} for each in (first, stats)]
    return {"right": right, "misses": reasons, "hits": sum(stats.hits.values())}


def several_kernels(url: str) -> dict[str, Any]:
    """A graph of three kernels with products in between, and how many kernels its entry has."""

    def thrice(x: Any, y: Any) -> Any:
        first = (x @ y).sin() + 1
        second = (first @ y).cos() * first.sum(0)
        return (second @ x).tanh() - second, first.exp()

    lowered = lowerings()
    torch.manual_seed(0)
    x, y = torch.rand(6, 6), torch.rand(6, 6)
    with s3cache.enabled(url) as cache:
        found = torch.compile(thrice)(x, y)
        cache.flush()
    # torch alone differs by up to 2e-5 from eager here: sums of sums, subtracted.
    pairs = zip(found, thrice(x, y), strict=True)
    right = all(torch.allclose(one, other, rtol=1e-4, atol=1e-4) for one, other in pairs)
    objects = Path(url.removeprefix("file://").partition("?")[0], "objects")
    entries = [frame.decode(path.read_bytes()) for path in objects.rglob("*") if path.is_file()]
    kernels = [name for entry in entries for name in entry.names if name.startswith("kernel")]
    return {"right": right, "lowered": len(lowered), "kernels": len(kernels)}


def matmul_of_ours(x: Any, y: Any, *, out: Any) -> None:
    """One that Inductor may choose, and registers by this name while it lowers."""
    torch.mm(x, y, out=out)


def external_matmul(url: str) -> dict[str, Any]:
    """A graph that calls it."""
    options = {
        "max_autotune_gemm": True,
        "max_autotune_gemm_backends": "TRITON",  # of which there is none on a processor
        "external_matmul": [matmul_of_ours],
    }
    s3cache.register_cacheable(matmul_of_ours, version="1")
    with s3cache.enabled(url) as cache, torch._inductor.config.patch(options):
        right = _runs(waved)
        cache.flush()
        return {"right": right, **account(cache)}


class Counter:
    """Telemetry: how often a function of torch was called, and with what."""

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


def timed(function: Any) -> Any:
    """The same of how long it took."""
    import time

    took = 0.0

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal took
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            took += time.perf_counter() - began

    return wrapper


def observed(url: str, kind: str) -> dict[str, Any]:
    """Three graphs, in a program that watches what traces them."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    lowered = lowerings()
    FakeTensorMode.dispatch = (  # type: ignore[method-assign]
        Counter if kind == "Counter" else timed
    )(FakeTensorMode.dispatch)
    graphs = [lambda x, y, by=by: (x @ y).sin() * by for by in (2, 3, 4)]
    with s3cache.enabled(url) as cache:
        right = all(_runs(graph) for graph in graphs)
        cache.flush()
        return {"right": right, "lowered": len(lowered), **account(cache)}
