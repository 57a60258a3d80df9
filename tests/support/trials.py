"""Programs as they are, on machines: what they lowered, which compilers ran, what the cache did.

The programs need not help. Each of their Python processes counts what Inductor lowers, and the
cache's own numbers (``witness/sitecustomize.py``); every compiler that is started, by whomever, is
a script first, which writes a line. What a program has to say are its lines that begin with
``loss``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from s3cache import testing

__all__ = ["Place", "Trial"]

_WITNESS = Path(__file__).parent / "witness"
_COMPILERS = ("c++", "cc", "clang", "clang++", "g++", "gcc")


@dataclass(frozen=True)
class Trial:
    """What all processes of a program came to, together.

    Attributes:
        lowered: graphs that Inductor lowered.
        compilers: how many compilers were started.
        losses: what the program has to say, sorted: ranks speak at once.
        cached: how many of the processes had a cache.
        hits, saved, uploaded, bypassed: what the caches counted; ``misses`` and ``reasons``, of
            bypasses, by reason.
        half_hits, halves: hits and entries kept at the second level; ``half_reasons`` of its
            bypasses.
        seconds: from the start of the first process to the end of the last.
    """

    lowered: int
    compilers: int
    losses: tuple[str, ...]
    seconds: float
    cached: int
    hits: int = 0
    misses: Mapping[str, int] = field(default_factory=dict)
    saved: int = 0
    uploaded: int = 0
    bypassed: int = 0
    reasons: Mapping[str, int] = field(default_factory=dict)
    half_hits: int = 0
    halves: int = 0
    half_reasons: Mapping[str, int] = field(default_factory=dict)

    def told(self) -> str:
        """It in a line, but for the losses."""
        return (
            f"{self.seconds:.1f} s, lowered {self.lowered}, compilers {self.compilers}, "
            f"hits {self.hits} + {self.half_hits}, misses {dict(self.misses)}, "
            f"bypassed {dict(self.reasons)} + {dict(self.half_reasons)}"
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Place:
    """A machine, the witnesses in each of its processes.

    Args:
        root: where everything is that s3cache and torch write.
        environment: variables of all processes, besides those of a fresh machine.
    """

    def __init__(self, root: Path, **environment: str) -> None:
        self.root = root
        self._number = 0
        paths = os.pathsep.join(filter(None, [str(_WITNESS), environment.pop("PYTHONPATH", "")]))
        machine = testing.Machine(root, **{"PYTHONPATH": paths, **environment})
        #: The whole environment of its processes.
        self.environment = {
            **machine.environment,
            "PATH": os.pathsep.join([str(self._spies()), machine.environment["PATH"]]),
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def _spies(self) -> Path:
        """A folder with a script for each compiler there is, of the same name."""
        folder = self.root / "spies"
        folder.mkdir(exist_ok=True)
        for name in _COMPILERS:
            if real := shutil.which(name):
                script = folder / name
                script.write_text(
                    f'#!/bin/sh\necho "$0" >>"$WITNESS/compilers"\nexec {real} "$@"\n'
                )
                script.chmod(0o755)
        return folder

    def run(self, *command: str, timeout_s: float = 1800, **environment: str) -> Trial:
        """Run ``python *command`` in an empty directory, to its end.

        What it says is also read from each ``stdout.log`` below that directory: torchrun's
        ``--redirects``, without which ranks write into each other's lines.

        Raises:
            AssertionError: it ended badly; says how, with the end of what it wrote.
            subprocess.TimeoutExpired: it has not ended in that time.
        """
        self._number += 1
        work, told = (self.root / f"{kind}-{self._number}" for kind in ("work", "told"))
        for folder in (work, told):
            folder.mkdir()
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, *command],
            env={**self.environment, "WITNESS": str(told), **environment},
            cwd=work,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
        seconds = time.monotonic() - began
        wrote = (done.stdout + done.stderr)[-6000:]
        assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{wrote}"
        logs = [path.read_text(encoding="utf-8") for path in work.rglob("stdout.log")]
        said = [line for text in (done.stdout, *logs) for line in text.splitlines()]
        losses = sorted(line for line in said if line.startswith("loss "))
        assert losses, f"{command} has nothing to say:\n{wrote}"
        return _sum(told, losses, seconds)


def _sum(told: Path, losses: Sequence[str], seconds: float) -> Trial:
    log = told / "compilers"
    compilers = len(log.read_text().splitlines()) if log.exists() else 0
    processes = [json.loads(path.read_text()) for path in told.glob("*.json")]
    counted = [each["stats"] for each in processes if each["stats"]]
    sums: dict[str, Any] = {}
    for name, value in (pair for stats in counted for pair in stats.items()):
        if isinstance(value, int):
            sums[name] = sums.get(name, 0) + value
        else:
            counts: Counter[str] = Counter(sums.get(name))
            counts.update(value)
            sums[name] = dict(counts)
    return Trial(
        lowered=sum(each["lowered"] for each in processes),
        compilers=compilers,
        losses=tuple(losses),
        seconds=seconds,
        cached=len(counted),
        **sums,
    )
