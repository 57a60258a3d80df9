"""What each Python process of a :class:`tests.support.trials.Place` tells of itself at its end.

The interpreter imports this first, in every process whose ``PYTHONPATH`` has this folder: the
program, whatever starts it and whatever it starts. Nothing that runs is changed but for one
function, Inductor's lowering of a graph, around which calls are counted.
"""

from __future__ import annotations

import atexit
import importlib.abc
import importlib.machinery
import json
import os
import sys
from typing import Any

_LOWERING = "torch._inductor.graph"
_told: dict[str, Any] = {"lowered": 0, "stats": None}


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != _LOWERING:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                _count(module.GraphLowering)

            loader.exec_module = exec_module
        return spec


def _count(lowering: Any) -> None:
    original = lowering.run
    _told["counting"] = True

    def run(*args: Any, **kwargs: Any) -> Any:
        _told["lowered"] += 1
        return original(*args, **kwargs)

    lowering.run = run


def _tell(folder: str, process: int) -> None:
    if os.getpid() != process:  # a forked child that leaves as if it were the program
        return
    assert _LOWERING not in sys.modules or "counting" in _told, "nobody counted"
    if (caches := sys.modules.get("s3cache.cache")) and (cache := caches.latest()):
        stats = cache.stats()
        _told["stats"] = {
            "hits": sum(stats.hits.values()),
            "misses": {reason.value: count for reason, count in stats.misses.items()},
            "saved": stats.saved,
            "uploaded": stats.uploaded,
            "bypassed": stats.bypassed,
            "reasons": dict(stats.bypass_reasons),
            "half_hits": sum(stats.fx.hits.values()),
            "half_reasons": dict(stats.fx.bypass_reasons),
            "halves": stats.fx.saved - stats.fx.superseded,
        }
    with open(os.path.join(folder, f"{process}.json"), "w", encoding="utf-8") as file:
        json.dump(_told, file)


if "WITNESS" in os.environ:
    sys.meta_path.insert(0, _Finder())
    # What is registered first runs last: after s3cache's own exit, with the uploads in it.
    atexit.register(_tell, os.environ["WITNESS"], os.getpid())
