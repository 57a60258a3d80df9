"""Run the kinds of graphs of ``graphs.py`` in a process with stand-in GPUs, and report on them."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Callable
from typing import Any

from tests.support.gpu import standin


def run(*names: str) -> dict[str, Any]:
    """Run kinds in one process with fake tensors; return a report on each by name.

    A report has the counts, digests of the ``code`` that was generated or came with the entry and
    of the ``launched`` kernels, and the ``devices`` of those.
    """
    standin.install()
    import s3cache
    from tests.support.gpu import graphs

    cache = s3cache.enable()
    kinds = {name: vars(graphs)[name.replace(" ", "_")] for name in names}
    reports = {name: _report(cache, kind) for name, kind in kinds.items()}
    cache.flush(60)
    return reports


def _report(cache: Any, kind: Callable[[], None]) -> dict[str, Any]:
    import torch
    from torch._dynamo.utils import counters
    from torch._inductor.codecache import PyCodeCache

    torch._dynamo.reset()
    counters.clear()
    standin.counts.clear()
    standin.launched.clear()
    before = cache.stats()
    modules = len(PyCodeCache.modules)
    with standin.tensors(), torch.device("cuda"):
        kind()
    after = cache.stats()
    index = 0 if kind.__name__ == "cpp_wrapper" else torch.cuda.current_device()
    return {
        **standin.counts,
        "hits": _hits(after) - _hits(before),
        "fx hits": _hits(after.fx) - _hits(before.fx),
        "compiled": counters["inductor"]["fxgraph_cache_miss"],
        "code": [_code(module, index) for module in PyCodeCache.modules[modules:]],
        "launched": [f"{each.name} {each.code}" for each in standin.launched],
        "devices": sorted({each.device for each in standin.launched}),
    }


def _hits(stats: Any) -> int:
    return sum(stats.hits.values())


def _code(module: Any, index: int) -> str:
    """Return a digest of a module's code, without comments and the index of its device."""
    import linecache

    source = "".join(linecache.getlines(module.__file__))
    places = r"index=|cuda:|_DeviceGuard\(|set_device\(|get_raw_stream\(|raw_stream"
    source = re.sub(rf"({places}){index}\b", r"\1N", source)
    return hashlib.sha256(ast.dump(ast.parse(source)).encode()).hexdigest()[:16]
