"""Judge some changes in this process, or all changes in several processes."""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch

import s3cache
from tests.perturb.bases import BASES
from tests.perturb.changes import all_bases, all_changes, all_histories, surroundings
from tests.perturb.histories import History, judge_histories
from tests.perturb.judge import judge
from tests.perturb.program import keys
from tests.perturb.workers import Changes, Chunk, Histories, in_processes

ENOUGH = 4_300  # changes that `make test-perturb` must judge
_CHUNK = 60  # for one process: its end frees what torch keeps of each change


# A base must be compiled before it can hit, which takes most of the time.
_BASES_OF_A_PART = ("pointwise", "inplace", "dynamic")


def part(count: int) -> dict[str, Any]:
    """Judge about ``count`` changes, always the same ones, and some of each family."""
    everything = [
        change
        for change in all_changes()
        if change.base not in BASES or change.base in _BASES_OF_A_PART
    ]
    families = sorted({change.family for change in everything})
    chosen = []
    for family in families:
        members = [change for change in everything if change.family == family]
        share = max(min(4, count // 24), count * len(members) // len(everything))
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
    """Judge inputs that share a storage without the ``inputs.`` components, as with torch's key."""
    from s3cache.graph import _key

    components = [row for row in _key.COMPONENTS if not row[0].startswith("inputs.")]
    with patch.object(_key, "COMPONENTS", components):
        chosen = [change for change in all_changes() if change.family == "sharing"]
        return judge(all_bases(), [each for each in chosen if each.base == "inplace"]).as_dict()


def keys_here() -> dict[str, list[str | None]]:
    """Return the keys of some programs in this process."""
    return {name: keys(BASES[name]) for name in ("pointwise", "normed", "mlp")}


def settings_kept() -> dict[str, list[Any]]:
    """Return two keys of a program under each setting, or the reasons why it has none."""

    def attends(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        batch = x[None, None]
        attended = torch.nn.functional.scaled_dot_product_attention(batch, batch, batch)
        return torch.nn.functional.linear(x, w) + attended[0, 0]

    found: dict[str, list[Any]] = {}
    for name, context in surroundings().items():
        for _ in range(2):
            torch.compiler.reset()
            with context():
                x, w = torch.ones(4, 4, device="cpu"), torch.ones(4, 4, device="cpu")
                report = s3cache.check(torch.compile(attends), x, w.requires_grad_())
            found.setdefault(name, []).extend(
                each.key or [reason.message for reason in each.reasons] for each in report.graphs
            )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge all changes, or those of some families, and print the verdicts."""
    parser = argparse.ArgumentParser(prog="python -m tests.perturb.run", description=__doc__)
    parser.add_argument("families", nargs="*", help="all, if none is named")
    parser.add_argument("--each", type=int, default=1, help="judge only each n-th")
    parser.add_argument("--jobs", type=int, default=2, help="parallel processes (2)")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    chunks = _chunks(options.families, options.each)
    verdicts = in_processes(chunks, options.jobs)
    for family, counts in sorted(verdicts.counts.items()):
        print(f"{family:12}", *(f"{name} {count}" for name, count in sorted(counts.items())))
    for name in ("broken", "lost", "wrong"):
        for each in getattr(verdicts, name):
            print(f"{name}: {each}")
    took = (time.monotonic() - started) / 60
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = (used.ru_utime + used.ru_stime) / 60
    again = sum(family.get("same", 0) for family in verdicts.counts.values())
    print(
        f"{verdicts.judged - again} changes judged, and {again} programs made again, "
        f"in {took:.1f} minutes ({processor:.1f} of a processor)"
    )
    enough = options.families or verdicts.judged - again >= ENOUGH
    return 1 if verdicts.wrong or verdicts.lost or not enough else 0


def _chunks(families: Sequence[str], step: int) -> list[Chunk]:
    """Return everything to judge in chunks, one for each process; one base stays together."""
    changes = [each for each in all_changes() if not families or each.family in families]
    histories = [each for each in all_histories() if not families or each.family in families]
    found: list[Chunk] = []
    for family in sorted({each.family for each in changes}):
        members = [each for each in changes if each.family == family]
        members = sorted(members[::step], key=lambda each: each.base)
        found += [Changes(members[at : at + _CHUNK]) for at in range(0, len(members), _CHUNK)]
    for family in sorted({each.family for each in histories}):
        pairs = [each for each in histories if each.family == family]
        pairs = sorted(pairs[::step], key=lambda each: each.filled)
        found += [Histories(pairs[at : at + _CHUNK]) for at in range(0, len(pairs), _CHUNK)]
    return found


if __name__ == "__main__":
    sys.exit(main())
