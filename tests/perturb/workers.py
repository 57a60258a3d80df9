"""Parts of the suite, each in a fork of a process that has only imported torch."""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch._inductor.config
import torch._inductor.decomposition

from tests.perturb.changes import all_bases
from tests.perturb.histories import History, judge_histories
from tests.perturb.judge import Verdicts, judge
from tests.perturb.program import Change

_TIMEOUT_S = 1800
_THREADS = 2  # on every machine, because code depends on it


@dataclass(frozen=True)
class Changes:
    """Changes of base programs."""

    members: Sequence[Change]

    def judge(self) -> Verdicts:
        """Judge each change on a cache of its base."""
        return judge(_bases(), self.members)


@dataclass(frozen=True)
class Histories:
    """Pairs of programs of several calls."""

    members: Sequence[History]

    def judge(self) -> Verdicts:
        """Judge each second program on the cache of its first one."""
        verdicts = Verdicts()
        judge_histories(self.members, verdicts)
        return verdicts


Chunk: TypeAlias = Changes | Histories


_bases = functools.cache(all_bases)


class _Fork:
    """A process that judges one chunk."""

    def __init__(self, chunk: Chunk, place: Path) -> None:
        self.chunk, self.place = chunk, place
        self._began = time.monotonic()
        forks = multiprocessing.get_context("fork")
        self.answer, theirs = forks.Pipe(duplex=False)
        self._process = forks.Process(target=_judge, args=(chunk, place, theirs))
        self._process.start()
        theirs.close()

    @property
    def is_late(self) -> bool:
        return time.monotonic() - self._began > _TIMEOUT_S

    def finish(self) -> Verdicts:
        """Return the verdicts: all are wrong if it died, because a cache must not kill programs."""
        answer: Verdicts | str = f"did not answer within {_TIMEOUT_S} s"
        try:
            if self.answer.poll():
                answer = self.answer.recv()
        except EOFError:
            answer = "its process died"
        finally:
            self._process.kill()
            self._process.join()
            self.answer.close()
        if isinstance(answer, Verdicts):
            return answer
        verdicts = Verdicts()
        for member in self.chunk.members:
            verdicts.add(member, "wrong", answer)
        return verdicts


def in_processes(chunks: Sequence[Chunk], jobs: int) -> Verdicts:
    """Judge all chunks, ``jobs`` of them at a time; report progress on stderr."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("torch._inductor.compile_fx")  # once, and not in each fork
    _bases()
    verdicts = Verdicts()
    waiting = list(reversed(chunks))
    with tempfile.TemporaryDirectory(prefix="s3cache-perturb-") as root:
        free = [Path(root, str(number)) for number in range(jobs)]
        running: list[_Fork] = []
        while waiting or running:
            while free and waiting:
                running.append(_Fork(waiting.pop(), free.pop()))
            answers: list[Any] = [each.answer for each in running]
            ready = multiprocessing.connection.wait(answers, timeout=10)
            for fork in [each for each in running if each.answer in ready or each.is_late]:
                running.remove(fork)
                free.append(fork.place)
                found = fork.finish()
                verdicts.update(found)
                for each in (*found.wrong, *found.lost):
                    print(" ".join(each.split())[:300], file=sys.stderr)
                print(f"{verdicts.judged} judged", file=sys.stderr, flush=True)
    return verdicts


def _judge(chunk: Chunk, place: Path, pipe: Any) -> None:
    """Judge a chunk in the fork. ``place`` keeps compiled C++, by its source."""
    place.mkdir(exist_ok=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(place / "inductor")
    tempfile.tempdir = str(place)
    torch.set_num_threads(_THREADS)
    torch._inductor.config.compile_threads = 1
    # torch never undoes what this sets for libraries: the first change with it would differ.
    torch.set_float32_matmul_precision(torch.get_float32_matmul_precision())
    # torch keeps one table of the decompositions that exist at the first call.
    torch._inductor.decomposition.select_decomp_table()
    # torch measures guards only for logs, which takes half the time of a key.
    guards: Any = torch._dynamo.guards
    guards.profile_guard_manager = lambda *_: 0.0
    warnings.simplefilter("ignore")
    with open(place / "log", "a", encoding="utf-8") as log:
        os.dup2(log.fileno(), 2)
        try:
            pipe.send(chunk.judge())
        except BaseException:
            pipe.send(traceback.format_exc()[-600:])
    os._exit(0)
