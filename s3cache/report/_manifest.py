"""The keys that some runs used, to be copied to where the same is to run."""

from __future__ import annotations

from collections.abc import Sequence

from s3cache._words import counted
from s3cache.records import Run

__all__ = ["manifest"]


def manifest(runs: Sequence[Run]) -> str:
    """The keys that ``runs`` hit, and those that they saved something under, one to a line.

    What missed and was not saved is none of it. Nor are shape profiles, as nobody records those.
    """
    keys = dict.fromkeys(
        each.key for run in runs for each in run.records if each.outcome == "hit" and each.key
    )
    keys.update(
        dict.fromkeys(each.name for run in runs for each in run.events if each.event == "save")
    )
    lines = [f"# {counted(len(keys), 'key')} that {' '.join(run.name for run in runs)} used"]
    if not all(run.complete for run in runs):
        lines.append("# there were more, of which there is no record")
    return "".join(f"{line}\n" for line in [*lines, *keys])
