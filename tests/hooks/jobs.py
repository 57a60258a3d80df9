"""Jobs that the machines of these tests run. The functions import torch, not this module."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.watch import processes


@contextlib.contextmanager
def machine_here(url: str, name: str, **options: Any) -> Iterator[Any]:
    """Simulate a fresh machine in this process: its own disks, nothing compiled, counts at zero.

    Tests with a process for each machine prove that an entry needs nothing of its writer's process.
    """
    import torch
    from torch._inductor.utils import clear_caches

    import s3cache

    root = os.path.join(os.environ["HOME"], name)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(root, "inductor")
    clear_caches()
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    options = {"local_dir": os.path.join(root, "local"), **options}
    with s3cache.enabled(url, **options) as cache:
        yield cache


def log_records(level: int = logging.WARNING) -> list[logging.LogRecord]:
    """Return a list that gets each record that s3cache logs in this process from now on."""
    records: list[logging.LogRecord] = []
    handler, logger = logging.Handler(level), logging.getLogger("s3cache")
    vars(handler)["emit"] = records.append
    logger.addHandler(handler)
    logger.setLevel(level)
    return records


def account(cache: Any) -> dict[str, Any]:
    """Return the counts of the cache and of torch."""
    from torch._dynamo.utils import counters

    stats = cache.stats()
    return {
        "hits": dict(stats.hits),
        "misses": {str(reason): count for reason, count in stats.misses.items()},
        "saved": stats.saved,
        "bypassed": stats.bypassed,
        "bypass_reasons": dict(stats.bypass_reasons),
        "time_saved_s": stats.time_saved_s,
        "torch": dict(counters["aot_autograd"]),
        "inductor": {
            name: count for name, count in counters["inductor"].items() if "cache" in name
        },
    }


def model() -> Any:
    """Return a small network with kernels in the forward and in the backward."""
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))


def reduce(url: str, threads: list[int], dynamic: bool) -> list[dict[str, Any]]:
    """Compile on machines with these numbers of threads.

    The code has loops and reductions over several threads, and a part for one thread alone.
    """
    import torch

    def work(x: Any, total: Any) -> Any:
        normed = torch.nn.functional.layer_norm(x.cos(), (x.shape[-1],))
        total.add_(normed.square().mean())
        return (normed * x.square().mean()).softmax(-1), total + 1, x.amax(0)

    x = torch.linspace(-1, 1, 300_000).reshape(100, 3000)
    found = []
    for count in threads:
        torch.set_num_threads(count)
        with (
            machine_here(url, f"{dynamic}-{count}") as cache,
            torch._inductor.config.patch({"cpp.dynamic_threads": dynamic}),
        ):
            got = [each.clone() for each in torch.compile(work)(x, torch.zeros(1))]
            assert cache.flush(30)
            pairs = zip(got, work(x, torch.zeros(1)), strict=True)
            error = max(float((a - b).abs().max()) for a, b in pairs)
            found.append({**account(cache), "error": error})
    return found


def train(url: str) -> dict[str, Any]:
    """Run a training step, and a graph with the C++ wrapper; return counts and the error."""
    import torch
    import torch._inductor.compile_fx  # with CUDA, importing it asks ldconfig for libraries

    import s3cache

    started = processes()

    def step(function: Any, network: Any) -> list[Any]:
        x = torch.linspace(-1, 1, 40).reshape(5, 8).requires_grad_()
        out = function(x)
        out.square().sum().backward()
        return [out, x.grad, *(each.grad for each in network.parameters())]

    def wrapped(x: Any) -> Any:
        return (x.sin() * 2).softmax(-1) + 1

    with s3cache.enabled(url) as cache:
        eager, network = model(), model()
        expected = step(eager, eager)
        got = step(torch.compile(network), network)
        with torch._inductor.config.patch(cpp_wrapper=True):
            x = torch.linspace(-1, 1, 40).reshape(5, 8)
            got.append(torch.compile(wrapped)(x))
            expected.append(wrapped(x))
        cache.flush()
        found = account(cache)
    error = max(float((a - b).abs().max()) for a, b in zip(expected, got, strict=True))
    return {**found, "error": error, "started": started, "torch_at": torch.__file__}


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
