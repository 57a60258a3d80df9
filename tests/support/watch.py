"""What a process compiles and starts, from now on, whatever any counter says of it."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["lowerings", "processes"]


def lowerings() -> list[Any]:
    """Every graph that Inductor lowers."""
    from torch._inductor.graph import GraphLowering

    lowered: list[Any] = []
    original = GraphLowering.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        lowered.append(self.graph_id)
        return original(self, *args, **kwargs)

    lowering: Any = GraphLowering
    lowering.run = run
    return lowered


def processes() -> list[str]:
    """Every process that Python starts."""
    started: list[str] = []

    def saw(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("subprocess.Popen", "os.posix_spawn", "os.exec", "os.system", "os.fork"):
            started.append(f"{event} {arguments[:2]!r}"[:500])

    sys.addaudithook(saw)
    return started
