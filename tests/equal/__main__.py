"""Judge pairs of programs that differ in one thing: the second one must miss, or be right.

    python -m tests.equal [--each N] [--jobs N] [--recall] [FAMILY ...]

The family ``samples`` has equal programs: torch's own samples of its operators, which must hit.
With ``--recall``, changed programs run on the recalled frames of their base, and must not be
traced: a recalled frame must do the same as eager mode, anything else is a miss.
"""

from __future__ import annotations

import argparse
import importlib
import os
import queue
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
import torch._inductor.decomposition

from tests.equal.changes import all_pairs
from tests.equal.judge import Verdicts, judge
from tests.equal.operators import operators
from tests.equal.programs import Pair
from tests.support.children import in_child

ENOUGH = 4_500  # pairs that `make test-perturb` must judge
_CHUNK = 60  # for one process: its end frees what torch keeps of each pair
_TIMEOUT_S = 1800
_THREADS = 2  # on every machine, because code depends on it


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge all pairs, or those of some families, and print the verdicts."""
    parser = argparse.ArgumentParser(prog="python -m tests.equal", description=__doc__)
    parser.add_argument("families", nargs="*", help="all, if none is named")
    parser.add_argument("--each", type=int, default=1, help="judge only each n-th")
    parser.add_argument("--jobs", type=int, default=2, help="parallel processes (2)")
    parser.add_argument("--recall", action="store_true", help="recall frames of changed programs")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    pairs = [*all_pairs(), *operators()]
    pairs = [each for each in pairs if each.family in (options.families or [each.family])]
    if options.recall:
        pairs = [replace(each, recall=True) for each in pairs if each.by_key]
    verdicts = in_processes(_chunks(pairs, options.each), options.jobs)
    print(*verdicts.lines(), sep="\n")
    took = (time.monotonic() - started) / 60
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = (used.ru_utime + used.ru_stime) / 60
    print(
        f"{verdicts.judged} changes judged in {took:.1f} minutes ({processor:.1f} of a processor)"
    )
    enough = options.families or options.recall or verdicts.judged >= ENOUGH
    return 1 if verdicts.wrong or verdicts.lost or not enough else 0


def _chunks(pairs: Sequence[Pair], step: int) -> list[list[Pair]]:
    """Return each n-th pair of each family in chunks; pairs with one first program are together."""
    chunks = []
    for family in sorted({pair.family for pair in pairs}):
        members = [pair for pair in pairs if pair.family == family][::step]
        members.sort(key=lambda pair: pair.filled)
        chunks += [members[at : at + _CHUNK] for at in range(0, len(members), _CHUNK)]
    return chunks


def in_processes(chunks: Sequence[list[Pair]], jobs: int) -> Verdicts:
    """Judge all chunks, ``jobs`` of them at a time; report progress on stderr."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("torch._inductor.compile_fx")  # once, and not in each fork
    verdicts = Verdicts()
    places: queue.Queue[Path] = queue.Queue()

    def judge_chunk(chunk: list[Pair]) -> dict[str, Any]:
        place = places.get()
        found, error = in_child(
            lambda: _judged(chunk, place), timeout_s=_TIMEOUT_S, log=str(place / "log")
        )
        places.put(place)
        if error:  # all are wrong if it died, because a cache must not kill programs
            judged = Verdicts()
            for pair in chunk:
                judged.add(pair, "wrong", error)
            found = judged.as_dict()
        return dict(found)

    with (
        tempfile.TemporaryDirectory(prefix="s3cache-equal-") as root,
        ThreadPoolExecutor(jobs) as pool,
    ):
        for number in range(jobs):
            places.put(place := Path(root, str(number)))
            place.mkdir()
        for judged in pool.map(judge_chunk, chunks):
            verdicts.update(judged)
            for each in (*judged["wrong"], *judged["lost"]):
                print(" ".join(each.split())[:300], file=sys.stderr)
            print(f"{verdicts.judged} judged", file=sys.stderr, flush=True)
    return verdicts


def _judged(chunk: list[Pair], place: Path) -> dict[str, Any]:
    """Judge a chunk in the fork. ``place`` keeps compiled C++, by its source."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(place / "inductor")
    tempfile.tempdir = str(place)
    torch.set_num_threads(_THREADS)
    torch._inductor.config.compile_threads = 1
    # torch keeps one table of the decompositions that exist at the first call.
    torch._inductor.decomposition.select_decomp_table()
    # torch measures guards only for logs, which takes half the time of a key.
    guards: Any = torch._dynamo.guards
    guards.profile_guard_manager = lambda *_: 0.0
    warnings.simplefilter("ignore")
    return judge(chunk).as_dict()


if __name__ == "__main__":
    sys.exit(main())
