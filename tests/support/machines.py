"""Machines for tests of the compile cache: processes that share nothing but a remote.

A job is a function of an importable module, ``"tests.kinds.jobs:cold"``. It runs in a new process
with a home, a temporary directory, an Inductor cache and a local tier below the machine's root;
arguments and result are what JSON can hold. torch is imported there, never here.
"""

from __future__ import annotations

import importlib
import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "Machine", "Outcome", "remote_url"]

ROOT = Path(__file__).resolve().parents[2]

_PLACES = {
    "HOME": "home",
    "XDG_CACHE_HOME": "home/.cache",
    "TMPDIR": "tmp",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "S3CACHE_LOCAL_DIR": "local",
}
_KEPT = ("PATH", "LANG", "LD_LIBRARY_PATH")
_OUTPUT_LINES = 60


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
    """A disk of its own, and the processes that run on it one after the other.

    Args:
        root: where everything is that s3cache and torch write.
        environment: of all its processes, besides what a fresh machine has.
    """

    def __init__(self, root: Path, **environment: str) -> None:
        self.root = root
        for place in _PLACES.values():
            (root / place).mkdir(parents=True, exist_ok=True)
        self.environment = {
            **{name: os.environ[name] for name in _KEPT if name in os.environ},
            **{name: str(root / place) for name, place in _PLACES.items()},
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONWARNINGS": "ignore",
            "USER": root.name,
            # One compiling process; what it finds out about the machine it need not probe.
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TORCHINDUCTOR_VEC_ISA_OK": "1",
            **environment,
        }

    def run(
        self,
        job: str,
        *arguments: Any,
        remote: str | None = None,
        settings: dict[str, Any] | None = None,
        timeout_s: float = 300,
        python: str = sys.executable,
    ) -> Outcome:
        """Call ``job(*arguments)`` in a new process, within ``s3cache.enabled(remote)``.

        Without ``remote``, the job enables s3cache itself, or leaves it alone.

        Raises:
            AssertionError: it ended badly; says how, with the end of what it wrote.
        """
        out = self.root / "outcome.json"
        out.unlink(missing_ok=True)
        call = {"job": job, "arguments": arguments, "remote": remote, "settings": settings or {}}
        command = [python, "-m", "tests.support.machines", str(out), json.dumps(call)]
        try:
            done = subprocess.run(
                command,
                env=self.environment,
                cwd=self.root,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as exc:
            said = "".join(_text(each) for each in (exc.stdout, exc.stderr))
            raise AssertionError(_story(job, f"still running after {timeout_s} s", said)) from None
        if done.returncode or not out.exists():
            said = done.stdout + done.stderr
            how = f"exit {done.returncode} of {shlex.join(command)}"
            raise AssertionError(_story(job, how, said))
        return Outcome(**json.loads(out.read_text()), stderr=done.stderr)


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _story(job: str, how: str, output: str) -> str:
    lines = output.splitlines()
    cut = [f"... {len(lines) - _OUTPUT_LINES} lines"] if len(lines) > _OUTPUT_LINES else []
    return "\n".join([f"{job}: {how}", *cut, *lines[-_OUTPUT_LINES:]])


# -- in the new process


def _main(out: str, call: str) -> None:
    wanted = json.loads(call)
    module, _, name = wanted["job"].partition(":")
    function = getattr(importlib.import_module(module), name)
    if wanted["remote"] is None:
        found = {"result": function(*wanted["arguments"])}
    else:
        found = _with_cache(function, **wanted)
    Path(out).write_text(json.dumps(found))


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


if __name__ == "__main__":
    _main(*sys.argv[1:])
