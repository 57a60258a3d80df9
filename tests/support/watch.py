"""What a process compiles and starts, from now on, whatever any counter says of it."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["lowerings", "processes"]


def lowerings() -> list[Any]:
    """Every graph that Inductor lowers: the seconds that each took, as torch times them itself.

    A function in the place of Inductor's own would be in every key.
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
    """Every process that Python starts."""
    started: list[str] = []

    def saw(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("subprocess.Popen", "os.posix_spawn", "os.exec", "os.system", "os.fork"):
            started.append(f"{event} {arguments[:2]!r}"[:500])

    sys.addaudithook(saw)
    return started
