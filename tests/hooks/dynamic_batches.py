"""Jobs whose batches have several sizes."""

from __future__ import annotations

from typing import Any

from tests.hooks.jobs import machine_here
from tests.support.watch import lowerings


class _Counted:
    """Graphs that Inductor lowers, and compilers that are started."""

    def __init__(self) -> None:
        import sys

        self._lowered, self.started = lowerings(), 0
        sys.addaudithook(self._saw)

    @property
    def lowered(self) -> int:
        return len(self._lowered)

    def _saw(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("subprocess.Popen", "os.posix_spawn"):
            self.started += 1


def _model() -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))


def _difference(model: Any, compiled: Any, batch: int) -> float:
    """How far results and gradients of one step are from eager's."""
    import torch

    torch.manual_seed(batch)
    data, found = torch.randn(batch, 4), []
    for forward in (model, compiled):
        model.zero_grad()
        out = forward(data)
        out.square().mean().backward()
        found.append([out.detach(), *(each.grad for each in model.parameters())])
    pairs = zip(*found, strict=True)
    return max(float((eager - ours).abs().max()) for eager, ours in pairs)


def machines(url: str, told: list[tuple[str, list[int], dict[str, Any]]]) -> dict[str, Any]:
    """Train on batches of these sizes, one after the other, on fresh machines by name."""
    import torch

    found, counted = {}, _Counted()
    for name, batches, options in told:
        with machine_here(url, name, shape_profile=options.pop("profile", True)) as cache:
            lowered, started = counted.lowered, counted.started
            model = _model()
            compiled = torch.compile(model, **options)
            worst = max(_difference(model, compiled, batch) for batch in batches)
            cache.flush()
            stats = cache.stats()
        found[name] = {
            "worst": worst,
            "lowered": counted.lowered - lowered,
            "started": counted.started - started,
            "hits": sum(stats.hits.values()),
            "misses": sum(stats.misses.values()),
            "saved": stats.saved,
        }
    return found


def needs_constants(
    url: str, values: list[int], fullgraph: bool = True, sizes: bool = True
) -> dict[str, dict[str, str]]:
    """Compile what no symbol answers, of numbers and of sizes: what failed, and how."""
    import math
    import struct

    import torch
    import torch._inductor.compile_fx  # with which s3cache begins

    import s3cache

    def of_size(of_number: Any) -> Any:
        return lambda x: of_number(x, x.shape[0])

    asks = {
        "gcd": lambda x, n: x + math.gcd(n, 4),
        "comb": lambda x, n: x + math.comb(n, 2),
        "str": lambda x, n: x + len(str(n)),
        "pow": lambda x, n: x + pow(n, 2, 3),
        "pack": lambda x, n: x + len(struct.pack("i", n)),
    }

    def begin(x: Any) -> Any:
        return x + 1

    failed = {}
    with s3cache.enabled(url) as cache:
        torch.compile(begin, backend="eager")(torch.ones(2))  # which names the program
        for name, ask in asks.items():
            for of in ("a number", "a size")[: 1 + sizes]:
                torch._dynamo.reset()
                function = ask if of == "a number" else of_size(ask)
                compiled = torch.compile(function, backend="eager", fullgraph=fullgraph)
                for value in values:
                    given = (torch.ones(3), value) if of == "a number" else (torch.ones(value),)
                    try:
                        assert torch.equal(compiled(*given), function(*given))
                    except Exception as error:
                        failed[f"{name} of {of}"] = repr(error)[:200]
        cache.flush()
    return {"failed": failed}
