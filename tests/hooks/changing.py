"""Jobs whose batches have several sizes."""

from __future__ import annotations

from typing import Any


class _Counted:
    """Graphs that Inductor lowers, and compilers that are started."""

    def __init__(self) -> None:
        import sys

        from torch._inductor.graph import GraphLowering

        self.lowered = self.started = 0
        original = GraphLowering.run

        def run(graph: Any, *args: Any, **kwargs: Any) -> Any:
            self.lowered += 1
            return original(graph, *args, **kwargs)

        lowering: Any = GraphLowering
        lowering.run = run
        sys.addaudithook(self._saw)

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


def steps(url: str, batches: list[int], options: dict[str, Any]) -> dict[str, Any]:
    """Train on batches of these sizes, one after the other."""
    import torch

    import s3cache

    with s3cache.enabled(url) as cache:
        model = _model()
        compiled = torch.compile(model, **options)
        counted = _Counted()
        worst = [_difference(model, compiled, batch) for batch in batches]
        cache.flush()
        stats = cache.stats()
    return {
        "worst": max(worst),
        "lowered": counted.lowered,
        "started": counted.started,
        "hits": sum(stats.hits.values()),
        "misses": sum(stats.misses.values()),
        "saved": stats.saved,
    }
