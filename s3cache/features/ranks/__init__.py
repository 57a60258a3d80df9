"""Ranks: those of one job that exchange data while they compile all hit, or all compile.

*Promises*: no rank waits forever for one that hit. Compile workers of all ranks fit the cores.

*Subscribes to*: ``looking_up`` and ``barred`` of the session, which are announced only if ranks
must agree.

*Without it*: such ranks compile each graph, and reports list processes instead of ranks.
"""

from __future__ import annotations

import os

from s3cache.errors import Reason
from s3cache.seam import Feature, Launch

MISSED = Reason.declare(
    "ranks", "another rank of the job missed, and all ranks compile together", is_expected=True
)

_OF_JOB = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")


def _launch() -> Launch:
    """Return what torchrun, or a launcher like it, has set."""
    job = " ".join(os.environ.get(name, "") for name in _OF_JOB)
    return Launch("rank", os.environ.get("RANK", ""), job)


FEATURE = Feature(
    name="ranks",
    does="making ranks agree on hits",
    reasons=(MISSED,),
    launch=_launch,
    installs=f"{__name__}.install:install",
    torch=f"{__name__}.names",
)
