"""Judge all changes, or a part of them, in this process."""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from typing import Any
from unittest.mock import patch

from tests.perturb.bases import BASES
from tests.perturb.changes import all_bases, all_changes, all_histories
from tests.perturb.histories import History, judge_histories
from tests.perturb.judge import Verdicts, judge

__all__ = ["part", "suite", "with_torchs_own_key"]


# A base that is hit has to be compiled first, which is what takes the time.
_BASES_OF_A_PART = ("pointwise", "inplace", "dynamic")


def part(count: int) -> dict[str, Any]:
    """Judge ``count`` of the changes, always the same ones and some of each family."""
    everything = [
        change
        for change in all_changes()
        if change.base not in BASES or change.base in _BASES_OF_A_PART
    ]
    families = sorted({change.family for change in everything})
    chosen = []
    for family in families:
        members = [change for change in everything if change.family == family]
        share = max(4, count * len(members) // len(everything))
        chosen += random.Random(family).sample(members, min(share, len(members)))
    verdicts = judge(all_bases(), chosen)
    judge_histories(_some_of_each(count // 60), verdicts)
    return verdicts.as_dict()


def _some_of_each(count: int) -> list[History]:
    histories = all_histories()
    chosen = []
    for family in sorted({history.family for history in histories}):
        members = [history for history in histories if history.family == family]
        assert len(members) >= 40, f"{family} has {len(members)} members"
        chosen += random.Random(family).sample(members, count)
    return chosen


def with_torchs_own_key() -> dict[str, Any]:
    """Judge inputs that share a storage while keys have nothing but what torch's have."""
    from s3cache.graph import _key

    def nothing(*_: object) -> dict[str, Any]:
        return {}

    with patch.object(_key, "input_components", nothing):
        chosen = [change for change in all_changes() if change.family == "sharing"]
        return judge(all_bases(), [each for each in chosen if each.base == "inplace"]).as_dict()


def suite() -> Verdicts:
    """Judge every change and every history."""
    verdicts = judge(all_bases(), all_changes())
    judge_histories(all_histories(), verdicts)
    return verdicts


def main() -> int:
    """Judge every change and print what became of them."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="s3cache-perturb-") as root:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.tempdir = root
        verdicts = suite()
    for family, counts in sorted(verdicts.counts.items()):
        print(f"{family:10}", *(f"{name} {count}" for name, count in sorted(counts.items())))
    for name in ("right", "broken", "wrong"):
        for each in getattr(verdicts, name):
            print(f"{name}: {each}")
    print(f"{verdicts.judged} changes judged in {time.monotonic() - started:.0f} s")
    return 1 if verdicts.wrong or verdicts.judged < 2000 else 0


if __name__ == "__main__":
    sys.exit(main())
