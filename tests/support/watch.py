"""Observe what a process compiles and starts, independently of the cache's counters."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


class Watch:
    """Counts everything that each job compiles, starts, looks up and saves."""

    def __init__(self) -> None:
        self._lowered, self._started = lowerings(), processes()

    def around(self, job: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the result of ``job``, with ``lowered`` and ``started``.

        These are the number of graphs that Inductor lowered, and a line for each process. If
        s3cache is enabled, ``counts`` has its counters, and ``reasons`` why it bypassed graphs.
        """
        import s3cache

        self._lowered.clear()
        self._started.clear()
        cache = s3cache.active()
        before = None if cache is None else cache.stats()
        found = job()
        found.update(lowered=len(self._lowered), started=list(self._started))
        if cache is not None and before is not None:
            cache.flush(60)
            after = cache.stats()
            had = _counts(before)
            found["counts"] = {name: count - had[name] for name, count in _counts(after).items()}
            reasons = after.bypass_reasons.items()
            known = before.bypass_reasons
            found["reasons"] = sorted(why for why, count in reasons if count > known.get(why, 0))
        return found


def _counts(stats: Any) -> dict[str, int]:
    return {
        "hits": sum(stats.hits.values()),
        "misses": sum(stats.misses.values()),
        "saved": stats.saved,
        "half_hits": sum(stats.fx.hits.values()),
        "halves": stats.fx.saved - stats.fx.contained,
        "bypassed": stats.bypassed,
    }


def lowerings() -> list[Any]:
    """Return a list that gets the seconds of each graph that Inductor lowers, as torch times them.

    A replacement of Inductor's own function would be part of every key.
    """
    from torch._dynamo import utils

    lowered: list[Any] = []

    class Metrics(dict[str, list[float]]):
        def clear(self) -> None:
            super().clear()
            self["GraphLowering.run"] = lowered

    utils.compilation_time_metrics = Metrics(utils.compilation_time_metrics)
    utils.compilation_time_metrics["GraphLowering.run"] = lowered
    return lowered


def processes() -> list[str]:
    """Return a list that gets a line for each process that Python starts."""
    started: list[str] = []

    def saw(event: str, arguments: tuple[Any, ...]) -> None:
        if event in (
            "subprocess.Popen",
            "os.posix_spawn",
            "os.exec",
            "os.spawn",
            "os.system",
            "os.fork",
        ):
            started.append(f"{event} {arguments[:2]!r}"[:500])

    sys.addaudithook(saw)
    return started
