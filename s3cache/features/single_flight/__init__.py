"""Single-flight: one process compiles a missing graph while the others wait for its entry.

*Promises*: waits are bounded; a process that waits holds no claim; no claim is held while the
user's code runs. A claim is for the processes of a machine, a lease for machines.

*Subscribes to*: ``missed`` of the cache, for ports, and of the session; ``hit``, ``saved`` and
``is_awaited`` of the session once a graph was claimed.

*Without it*: all processes that miss a graph compile it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from s3cache.errors import Reason
from s3cache.seam import Feature
from s3cache.util.options import choice, option, seconds

WAITED = Reason.declare(
    "waited", "another process did not end its compile within wait_s", of_parts=True
)
Leases: TypeAlias = Literal["auto", "on", "off"]


@dataclass(frozen=True, kw_only=True)
class SingleFlightOptions:
    """The options of single-flight."""

    wait_s: float = option(600.0, seconds())
    leases: Leases = option("auto", choice(*get_args(Leases)))


def _in_words(counts: Mapping[str, float]) -> str:
    """Return ``2 compiled by others (1.5 s waited)``."""
    waits = int(counts.get("waits", 0))
    return f"{waits} compiled by others ({counts['waited_s']:.1f} s waited)" if waits else ""


FEATURE = Feature(
    name="single_flight",
    does="waiting for entries that other processes compile",
    reasons=(WAITED,),
    options=SingleFlightOptions,
    # ``claimed``: compiles for which other processes of this machine could wait; ``waits``,
    # ``waited_s``: waits for another process; ``taken_over``: leases that were not renewed.
    counts=("claimed", "waits", "waited_s", "taken_over"),
    events=tuple((name, "compiles for others, and waits") for name in ("claim", "wait")),
    reports=f"{__name__}.report:report",
    in_words=_in_words,
    is_used=lambda settings: settings.on_miss == "wait",
    begins=f"{__name__}.begin:SingleFlight",
    installs=f"{__name__}.install:install",
    torch=f"{__name__}.names",
)
