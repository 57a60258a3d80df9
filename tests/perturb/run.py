"""Judge all changes, or a part of them, in this process."""

from __future__ import annotations

import random
import sys
import time
from typing import Any

from tests.perturb.changes import all_bases, all_changes
from tests.perturb.judge import Verdicts, judge

__all__ = ["part", "suite"]


def part(count: int) -> dict[str, Any]:
    """Judge ``count`` of the changes, always the same ones and some of each family."""
    everything = all_changes()
    families = sorted({change.family for change in everything})
    chosen = []
    for family in families:
        members = [change for change in everything if change.family == family]
        share = max(4, count * len(members) // len(everything))
        chosen += random.Random(family).sample(members, min(share, len(members)))
    return judge(all_bases(), chosen).as_dict()


def suite() -> Verdicts:
    """Judge every change."""
    return judge(all_bases(), all_changes())


def main() -> int:
    """Judge every change and print what became of them."""
    started = time.monotonic()
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
