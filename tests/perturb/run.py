"""Judge a part of the changes in this process, or all of them in several."""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import random
import resource
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch._inductor.config

from tests.perturb.bases import BASES
from tests.perturb.changes import all_bases, all_changes, all_histories
from tests.perturb.explained import sample
from tests.perturb.histories import History, judge_histories
from tests.perturb.judge import Verdicts, judge
from tests.perturb.program import Change

__all__ = ["ENOUGH", "part", "with_torchs_own_key"]

ENOUGH = 6_000  # changes that `make test-perturb` has to judge
_CHUNK = 60  # that one process judges: what torch keeps of each is gone with it


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
        share = max(min(4, count // 24), count * len(members) // len(everything))
        chosen += random.Random(family).sample(members, min(share, len(members)))
    verdicts = judge(all_bases(), chosen)
    judge_histories(_some_of_each(count // 60), verdicts)
    return {**verdicts.as_dict(), "explained": sample(count // 2)}


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

    components = [row for row in _key.COMPONENTS if not row[0].startswith("inputs.")]
    with patch.object(_key, "COMPONENTS", components):
        chosen = [change for change in all_changes() if change.family == "sharing"]
        return judge(all_bases(), [each for each in chosen if each.base == "inplace"]).as_dict()


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge every change, or those of some families, and print what became of them."""
    parser = argparse.ArgumentParser(prog="python -m tests.perturb.run", description=__doc__)
    parser.add_argument("families", nargs="*", help="all of them, if none is named")
    parser.add_argument("--each", type=int, default=1, help="judge each n-th only")
    parser.add_argument("--jobs", type=int, default=2, help="processes, side by side (2)")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    verdicts = _in_processes(_parts(options.families, options.each), options.jobs)
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
        f"{verdicts.judged - again} changes judged, and {again} programs made anew, "
        f"in {took:.1f} minutes ({processor:.1f} of a processor)"
    )
    enough = options.families or verdicts.judged - again >= ENOUGH
    return 1 if verdicts.wrong or verdicts.lost or not enough else 0


def _parts(families: Sequence[str], step: int) -> list[Sequence[Any]]:
    """All that is to be judged, in parts for a process each; those of one base together."""
    everything: list[Any] = [*all_changes(), *all_histories()]
    found: list[Sequence[Any]] = []
    for family in sorted(
        {each.family for each in everything if not families or each.family in families}
    ):
        members = [each for each in everything if each.family == family][::step]
        members.sort(key=lambda each: each.base if isinstance(each, Change) else each.filled)
        found += [members[at : at + _CHUNK] for at in range(0, len(members), _CHUNK)]
    return found


# -- all of them, each chunk in a fork of this process, which has only imported torch

_TIMEOUT_S = 1800
_THREADS = 2  # whatever the machine has: code differs with it
# What forks find here: a change is made of functions, which no pickle can hold.
_chunks: list[Sequence[Any]] = []


def _in_processes(chunks: Sequence[Sequence[Any]], jobs: int) -> Verdicts:
    """Judge all chunks, ``jobs`` of them at a time; says on stderr how far it is.

    What dies or hangs is wrong, as the cache must never take the program with it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("torch._inductor.compile_fx")  # once, and not in each fork
    _chunks[:] = chunks
    verdicts = Verdicts()
    forks = multiprocessing.get_context("fork")
    with (
        tempfile.TemporaryDirectory(prefix="s3cache-perturb-") as root,
        forks.Pool(jobs, _begin, (root,), maxtasksperchild=1) as pool,
    ):
        waiting = [pool.apply_async(_judge, (number,)) for number in range(len(chunks))]
        for chunk, answer in zip(chunks, waiting, strict=True):
            try:
                came = answer.get(_TIMEOUT_S)
            except Exception as exc:
                why = traceback.format_exception_only(exc)[-1][-600:]
                came = Verdicts()
                for member in chunk:
                    came.add(member, "wrong", why)
            verdicts.update(came)
            for each in (*came.wrong, *came.lost):
                print(" ".join(each.split())[:300], file=sys.stderr)
            print(f"{verdicts.judged} judged", file=sys.stderr, flush=True)
    return verdicts


def _begin(root: str) -> None:
    """Set up a fork. Compiled C++ is kept for the next ones, by its source."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(root, "inductor")
    tempfile.tempdir = root
    torch.set_num_threads(_THREADS)
    torch._inductor.config.compile_threads = 1
    # torch never takes back what this sets of libraries, so that the first to use it would differ.
    torch.set_float32_matmul_precision(torch.get_float32_matmul_precision())
    # How long guards take is measured for logs alone, and takes half of what a key does.
    guards: Any = torch._dynamo.guards
    guards.profile_guard_manager = lambda *_: 0.0
    warnings.simplefilter("ignore")
    with open(os.path.join(root, "log"), "a", encoding="utf-8") as log:
        os.dup2(log.fileno(), 2)


def _judge(number: int) -> Verdicts:
    chunk = _chunks[number]
    if isinstance(chunk[0], Change):
        return judge(all_bases(), chunk)
    verdicts = Verdicts()
    judge_histories(chunk, verdicts)
    return verdicts


if __name__ == "__main__":
    sys.exit(main())
