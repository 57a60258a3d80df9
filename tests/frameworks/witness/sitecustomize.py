"""Write the counters of each Python process of a ``tests.frameworks`` program at its end.

The interpreter imports this module first in each process with this folder in its ``PYTHONPATH``:
the program, its launcher and its child processes. The program's behaviour does not change: torch
records the time of each lowering of a graph, and this module counts these records.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.abc
import importlib.machinery
import json
import logging
import os
import sys
import threading
from typing import Any

_TIMING = "torch._dynamo.utils"
_lowered: list[float] = []


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != _TIMING:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                module.compilation_time_metrics = _Metrics(module.compilation_time_metrics)

            loader.exec_module = exec_module
        return spec


class _Metrics(dict[str, list[float]]):
    """Torch's times of its operations, by name, with a list for lowerings that stays."""

    def __init__(self, metrics: dict[str, list[float]]) -> None:
        super().__init__(metrics)
        self["GraphLowering.run"] = _lowered

    def clear(self) -> None:
        super().clear()
        self["GraphLowering.run"] = _lowered


class _Refusals(logging.Handler):
    """Counts the reasons for which frames are not recalled."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.counts: dict[str, int] = {}

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg.startswith("a frame is not recalled") and isinstance(record.args, tuple):
            reason, function, why, *_ = record.args
            text = f"`{reason}`: {function} {why}"
            self.counts[text] = self.counts.get(text, 0) + 1


_refused = _Refusals()


def _write_counts(folder: str, process: int) -> None:
    if os.getpid() != process:  # a forked child that ends as the program does
        return
    if timing := sys.modules.get(_TIMING):
        assert type(timing.compilation_time_metrics) is _Metrics, "nothing was counted"
    counts: dict[str, Any] = {"lowered": len(_lowered)}
    if (caches := sys.modules.get("s3cache.cache")) and (cache := caches.current_cache()):
        stats = cache.stats()
        counts |= {
            "hits": sum(stats.hits.values()),
            "misses": {reason.value: count for reason, count in stats.misses.items()},
            "saved": stats.saved,
            "uploaded": stats.uploaded,
            "reasons": dict(stats.bypass_reasons),
            "half_hits": sum(stats.fx.hits.values()),
            "halves": stats.fx.saved - stats.fx.contained,
            "frames": stats.features.get("recall", {}),
            "refused": _refused.counts,
        }
    path = os.path.join(folder, f"{process}.json")
    with open(f"{path}.part", "w", encoding="utf-8") as file:
        json.dump(counts, file)
    os.replace(f"{path}.part", path)


def _write_repeatedly(folder: str, process: int) -> None:
    """Write the counters often, from a thread: a process that is killed has no end."""
    timing: Any = None
    while True:
        threading.Event().wait(0.2)
        if timing is None:
            timing = sys.modules.get(_TIMING)
        elif isinstance(getattr(timing, "compilation_time_metrics", None), _Metrics):
            # Modules may be half imported.
            with contextlib.suppress(AttributeError):
                _write_counts(folder, process)


if "WITNESS" in os.environ:
    sys.meta_path.insert(0, _Finder())
    logger = logging.getLogger("s3cache.recall")
    logger.addHandler(_refused)
    logger.setLevel(logging.INFO)
    # The function that is registered first runs last: after the uploads at s3cache's exit.
    atexit.register(_write_counts, os.environ["WITNESS"], os.getpid())
    if "WITNESS_OF_KILLED" in os.environ:
        arguments = (os.environ["WITNESS"], os.getpid())
        threading.Thread(target=_write_repeatedly, args=arguments, daemon=True).start()
