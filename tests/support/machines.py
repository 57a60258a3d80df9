"""Machines for tests of the compile cache: processes that share nothing but a remote.

A job is a function of an importable module, ``"tests.kinds.jobs:cold"``. It runs in a new process
with a home, a temporary directory, an Inductor cache and a local tier below the machine's root;
arguments and result are what JSON can hold. torch is imported there, never here.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from s3cache import testing

__all__ = ["ROOT", "Machine", "Outcome", "remote_url"]

ROOT = Path(__file__).resolve().parents[2]


def remote_url(root: Path) -> str:
    """A remote below ``root`` that any machine may read and write."""
    return f"file://{root}/remote?create=1"


@dataclass(frozen=True)
class Outcome:
    """What a job came to.

    Attributes:
        result: what the function returned.
        stats: what the cache counted, as plain data; ``{}`` if the job had no remote.
        counters: torch's own (``torch._dynamo.utils.counters``), by group; ``{}`` likewise.
        stderr: what it wrote there.
    """

    result: Any
    stats: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, dict[str, int]] = field(default_factory=dict)
    stderr: str = ""


class Machine:
    """One of :class:`s3cache.testing.Machine`, for jobs in this repository.

    Args:
        root: where everything is that s3cache and torch write.
        environment: of all its processes, besides what a fresh machine has.
    """

    def __init__(self, root: Path, **environment: str) -> None:
        self.root = root
        ours = {
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONWARNINGS": "ignore",
            # One compiling process; what it finds out about the machine it need not probe.
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TORCHINDUCTOR_VEC_ISA_OK": "1",
        }
        self._machine = testing.Machine(root, **{**ours, **environment})

    @property
    def environment(self) -> dict[str, str]:
        return self._machine.environment

    def run(
        self,
        job: str,
        *arguments: Any,
        remote: str | None = None,
        settings: dict[str, Any] | None = None,
        timeout_s: float = 800,
        python: str = sys.executable,
    ) -> Outcome:
        """Call ``job(*arguments)`` in a new process, within ``s3cache.enabled(remote)``.

        Without ``remote``, the job enables s3cache itself, or leaves it alone.

        Raises:
            AssertionError: it ended badly; says how, with the end of what it wrote.
        """
        done = self._machine.call(
            "tests.support.machines:do_job",
            *(job, arguments, remote, settings or {}),
            cwd=self.root,
            timeout_s=timeout_s,
            python=python,
        )
        return Outcome(**done.result, stderr=done.stderr)


# -- in the new process


def do_job(
    job: str, arguments: list[Any], remote: str | None, settings: dict[str, Any]
) -> dict[str, Any]:
    """The fields of an :class:`Outcome` but for ``stderr``."""
    module, _, name = job.partition(":")
    function = getattr(importlib.import_module(module), name)
    if remote is None:
        return {"result": function(*arguments)}
    return _with_cache(function, job, arguments, remote, settings)


def _with_cache(
    function: Any, job: str, arguments: list[Any], remote: str, settings: dict[str, Any]
) -> dict[str, Any]:
    import torch._dynamo

    import s3cache

    with s3cache.enabled(remote, **settings) as cache:
        assert s3cache.active() is cache, f"{job}: this torch is not supported"
        result = function(*arguments)
        report = cache.flush(60)
        assert not report.remaining, report
        stats = cache.stats()
    return {
        "result": result,
        "stats": {
            "hits": dict(stats.hits),
            "misses": {str(reason): count for reason, count in stats.misses.items()},
            "saved": stats.saved,
            "not_saved": {str(reason): count for reason, count in stats.not_saved.items()},
            "uploaded": stats.uploaded,
            "bypassed": stats.bypassed,
            "bypass_reasons": dict(stats.bypass_reasons),
            "set_aside": dict(stats.set_aside),
            "time_saved_s": stats.time_saved_s,
        },
        "counters": {group: dict(counts) for group, counts in torch._dynamo.utils.counters.items()},
    }
