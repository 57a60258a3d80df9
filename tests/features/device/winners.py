"""A program with a kernel that is measured, and that may die before the measurement."""

from __future__ import annotations

import os
import time
from typing import Any

from tests.support.gpu import kinds, standin


def softmax(at_first: str = "", later_s: float = 0.0) -> dict[str, Any]:
    """Compile and launch a kernel with two configurations; return the counts.

    Args:
        at_first: the action before the first measurement: ``upload`` all saves, upload them and
            ``die``, or nothing.
        later_s: how far the clock of this machine is ahead.
    """
    standin.install()
    import torch

    import s3cache

    cache, now = s3cache.enable(), time.time
    vars(time)["time"] = lambda: now() + later_s

    def first() -> None:
        if standin.counts["benchmark"] == 1 and at_first:
            assert cache.flush(60).complete
            if at_first == "die":
                os._exit(7)

    standin.before_measuring.append(first)
    error = ""
    with standin.tensors(), torch.device("cuda"):
        try:
            kinds.reductions()
        except Exception as exc:
            error = str(exc)
    assert cache.flush(60).complete
    stats = cache.stats()
    return {
        "measured": standin.counts["benchmark"],
        "hits": sum(stats.hits.values()),
        "uploaded": stats.uploaded,
        "error": error,
    }
