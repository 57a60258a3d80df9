"""Ranks: those of one job that exchange data while they compile all hit, or all compile.

*Promises*: no rank waits forever for one that hit. Compile workers of all ranks fit the cores.

*Subscribes to*: ``looking_up`` and ``barred`` of the session, which are announced only if ranks
must agree.

*Without it*: such ranks compile each graph, and reports list processes instead of ranks.
"""

from __future__ import annotations

from s3cache.errors import Reason
from s3cache.seam import Feature, Launcher

MISSED = Reason.declare(
    "ranks", "another rank of the job missed, and all ranks compile together", is_expected=True
)

# torchrun, and launchers like it.
_LAUNCHER = Launcher(
    word="rank",
    number="RANK",
    job=("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"),
)

FEATURE = Feature(
    name="ranks",
    does="making ranks agree on hits",
    reasons=(MISSED,),
    launcher=_LAUNCHER,
    installs=f"{__name__}.install:install",
    torch=f"{__name__}.names",
)
