"""Ports: the caches of other compilers, over the same tiers.

*Promises*: files of Triton, Helion, torchtitan and torch's own remote caches are shared like
graphs: local first, verified, uploaded later. A compiler gets files only after the whole entry has
been verified. Each adapter is imported with its compiler.

*Subscribes to*: no event; it installs an adapter when a compiler is imported, and uses the engine's
lookups and saves.

*Without it*: each compiler keeps its files on this machine.

Programs may name the modules ``triton``, ``helion`` and ``torchtitan``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from s3cache.seam import Feature
from s3cache.util.options import INERT_DEVICE, Kind, did_you_mean, option

#: The compilers with an adapter; each is the kind of its entries.
PORTS = ("triton", "torch", "helion", "torchtitan")


def _parse(text: str) -> str:
    for name in () if text in ("auto", "off") else text.replace(" ", "").split(","):
        if name not in PORTS:
            fix = did_you_mean(name, PORTS, "use auto, off, or names with commas between")
            raise ValueError(f"{name!r} is not a known compiler", fix)
    return text.replace(" ", "")


@dataclass(frozen=True, kw_only=True)
class PortOptions:
    """The options of ports."""

    ports: str = option("auto", Kind(_parse, (str,)))

    def wants_port(self, name: str) -> bool:
        """Return whether to share the files of a compiler."""
        if name != "triton" and os.environ.get(INERT_DEVICE):
            return False  # the others share what they have measured
        return self.ports == "auto" or name in self.ports.split(",")


FEATURE = Feature(
    name="ports",
    does="sharing files of other compilers",
    options=PortOptions,
    kinds=PORTS,
    is_used=lambda settings: settings.ports != "off",
    waits=f"{__name__}.install:share_triton_later",
    installs=f"{__name__}.install:install",
    torch=f"{__name__}.names",
)
