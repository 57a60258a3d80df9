"""Jobs that set torch's own switches, one after the other in one process, with s3cache on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.hooks.jobs import account, machine_here


def product(x: Any, y: Any) -> Any:
    """A graph that Inductor compiles without a C++ compiler."""
    return x @ y


def unknown(x: Any, y: Any) -> Any:
    """A graph that cannot be cached as a whole: ``opaque`` is not registered."""
    return opaque(x @ y)


def opaque(x: Any) -> Any:
    return x @ x


def compiled(size: int, function: Any = product, grad: bool = False) -> bool:
    """Compile ``function`` again for a size of matrices; return whether it equals eager mode."""
    import torch

    torch._dynamo.reset()
    torch._dynamo.allow_in_graph(opaque)
    x = torch.arange(float(size * size)).reshape(size, size).requires_grad_(grad)
    y = x.detach().t().contiguous()
    out = torch.compile(function)(x, y)
    same: bool = torch.equal(out, function(x, y))
    if grad:
        out.sum().backward()
        assert x.grad is not None
        same &= torch.equal(x.grad, torch.ones_like(out) @ y.t())
    return same


class Counted:
    """The counts that each step adds."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.steps: dict[str, dict[str, int]] = {}
        self._before = self._now()

    def _now(self) -> dict[str, int]:
        found = account(self.cache)
        return {
            "hit": sum(found["hits"].values()),
            "miss": sum(found["misses"].values()),
            "saved": found["saved"],
            "bypass": found["bypassed"],
            **{"torch " + name.removeprefix("autograd_cache_"): n for name, n in
               found["torch"].items() if "cache" in name},
            **{name.removeprefix("fxgraph_cache_") + " fx": n for name, n in
               found["inductor"].items() if name.startswith("fxgraph_cache")},
        }  # fmt: skip

    def step(self, name: str) -> None:
        now = self._now()
        added = {each: n - self._before.get(each, 0) for each, n in now.items()}
        self.steps[name] = {each: n for each, n in added.items() if n}
        self._before = now


def switches(url: str) -> dict[str, Any]:
    """Return the counts that each switch adds, by its name."""
    import torch
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor
    from torch._inductor.utils import fresh_cache

    import s3cache

    cache = s3cache.enable(url)
    counted = Counted(cache)

    def step(name: str, size: int = 8, **options: Any) -> None:
        assert compiled(size, **options), name
        counted.step(name)

    compiler: Any = torch.compiler.config
    step("cold")
    step("warm")
    with compiler.patch(force_disable_caches=True):
        step("force_disable_caches")
    with functorch.patch(enable_autograd_cache=False):
        step("enable_autograd_cache=False")
        step("enable_autograd_cache=False again")
    with inductor.patch(fx_graph_cache=False):
        step("fx_graph_cache=False")
    with fresh_cache():
        step("fresh_cache")
        step("fresh_cache again")
    step("after fresh_cache")
    with compiler.patch(cache_key_tag="mine"):
        step("tag")
        step("tag again")
    step("no tag")
    with functorch.patch(strict_autograd_cache=True):
        step("strict_autograd_cache")
        with inductor.patch(fx_graph_cache=False):
            try:
                compiled(8)
                raised = ""
            except torch._dynamo.exc.BackendCompilerFailed as exc:
                raised = str(exc)
    counted.step("strict_autograd_cache bypass")
    s3cache.disable()
    return {"steps": counted.steps, "raised": raised, "moved": _moved(url)}


def _alone_here(url: str) -> dict[str, Any]:
    """Keep both levels, then only whole graphs, out of the remote; return steps and uploads."""
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    with machine_here(url, "alone") as cache:
        tiers = Tiers(cache)
        with (
            functorch.patch(enable_remote_autograd_cache=False),
            inductor.patch(fx_graph_remote_cache=False),
        ):
            tiers.compile("both out", 8)  # the remote has it
            tiers.compile("both out again", 8)
            tiers.compile("both out, a half", 8, function=unknown)  # the same
        cache.flush()
        uploaded = [cache.stats().uploaded]
        with functorch.patch(enable_remote_autograd_cache=False):
            tiers.compile("whole graphs out", 11)
        cache.flush()
        uploaded.append(cache.stats().uploaded)
        tiers.compile("neither", 12)
        cache.flush()
        uploaded.append(cache.stats().uploaded)
    return {"steps": tiers.steps, "uploaded": uploaded}


def _remote_alone(url: str) -> dict[str, Any]:
    """Compile with options of torch that leave each level only the remote tier."""
    import os

    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    with machine_here(url, "remote") as cache:
        tiers = Tiers(cache)
        with (
            functorch.patch(enable_autograd_cache=False, enable_remote_autograd_cache=True),
            inductor.patch(fx_graph_cache=False, fx_graph_remote_cache=True),
        ):
            for name, options in {"": {}, ", a half": {"function": unknown}}.items():
                tiers.compile(f"there{name}", 8, **options)
                tiers.compile(f"there again{name}", 8, **options)
                tiers.compile(f"not there{name}", 13, **options)
                cache.flush()
                tiers.compile(f"uploaded{name}", 13, **options)
        tiers.compile("local too", 8)
    kept = os.path.join(os.environ["TORCHINDUCTOR_CACHE_DIR"], "fxgraph")
    return {"steps": tiers.steps, "by torch": os.path.exists(kept)}


def _shared(url: str) -> dict[str, Any]:
    """Compile a whole graph, and a graph that only the second level serves."""

    with machine_here(url, "writer") as cache:
        tiers = Tiers(cache)
        tiers.compile("whole", 8)
        tiers.compile("half", 8, function=unknown)
    return {"steps": tiers.steps}


def remote_switches(url: str) -> list[dict[str, Any]]:
    """Run all three jobs in turn; also return the remote's entries after the first one."""
    written = _shared(url)
    remote = Path(url.removeprefix("file://").partition("?")[0]) / "objects"
    entries = [str(path) for path in remote.rglob("*") if path.is_file()]
    return [{**written, "entries": entries}, _alone_here(url), _remote_alone(url)]


class Tiers(Counted):
    """The tier that each compile hits at each level, and its saves."""

    def _now(self) -> dict[str, int]:
        stats = self.cache.stats()
        found = {"saved": stats.saved, "saved fx": stats.fx.saved, "bypass": stats.bypassed}
        for level, counts in (("", stats), (" fx", stats.fx)):
            found |= {f"{tier}{level}": n for tier, n in counts.hits.items()}
            found |= {f"{reason}{level}": n for reason, n in counts.misses.items()}
        return found

    def compile(self, name: str, size: int, **options: Any) -> None:
        assert compiled(size, **options), name
        self.step(name)


def _moved(url: str) -> dict[str, Any]:
    """Move Inductor's cache, and enable s3cache inside a fresh one: s3cache stays on."""
    import os
    import tempfile

    from torch._inductor.utils import fresh_cache

    import s3cache

    with s3cache.enabled(url) as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
        assert compiled(8)
        found = {"moved": account(cache)["hits"]}
    with fresh_cache():
        inside = s3cache.enable(url)
        assert compiled(8)
        found["inside"] = account(inside)["hits"]
    assert compiled(8)
    found["after"] = account(inside)["hits"]
    s3cache.disable()
    return found
