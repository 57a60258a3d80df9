"""Stand-ins for compiled graphs, made from a seed: the machines of the storage demo save them."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

from s3cache import frame
from s3cache.frame import Frame

__all__ = ["Graph", "graphs"]

_SMALLEST_BYTES = 64 << 10
_LARGEST_BYTES = 4 << 20


@dataclass(frozen=True)
class Graph:
    """A graph that a job needs compiled; two machines compile the same graph to equal bytes."""

    key: str
    seed: str

    def compile(self) -> bytes:
        """Return the entry, as if from a compiler."""
        return frame.encode(kind="demo", key=self.key, sections=self._sections())

    def made(self, entry: Frame) -> bool:
        """Return whether ``entry`` has the same content as :meth:`compile`, byte for byte."""
        wanted = self._sections()
        return entry.names == tuple(wanted) and all(
            bytes(entry.section(name)) == data for name, data in wanted.items()
        )

    def _sections(self) -> dict[str, bytes]:
        chance = random.Random(self.seed)
        size = int(_SMALLEST_BYTES * (_LARGEST_BYTES / _SMALLEST_BYTES) ** chance.random())
        return {
            "source": f"// kernels of graph {self.seed}\n".encode() * 64,
            "kernels": chance.randbytes(size),
        }


def graphs(count: int) -> list[Graph]:
    """Return ``count`` graphs, the same on every machine."""
    return [
        Graph(hashlib.sha256(f"s3cache/{index}".encode()).hexdigest(), f"s3cache/{index}")
        for index in range(count)
    ]
