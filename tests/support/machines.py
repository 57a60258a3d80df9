"""Machines for tests of the compile cache: processes that share only a remote.

A job is a function of an importable module, ``"tests.equal.cases:run"``. It runs in a new process
with a home, a temporary directory, an Inductor cache and a local tier below the machine's root;
arguments and result must be JSON values. torch is imported there, never here.
"""

from __future__ import annotations

import importlib
import os
import secrets
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path
from typing import Any

from s3cache import testing
from s3cache.testing import Outcome
from tests.support.forking import Forks

ROOT = Path(__file__).resolve().parents[2]
_OURS = {
    "PYTHONPATH": str(ROOT),
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONWARNINGS": "ignore",
    # One compiling process, which need not probe the machine's vector instructions.
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TORCHINDUCTOR_VEC_ISA_OK": "1",
}

_FORKS = "S3CACHE_TEST_FORKS"  # the process that started this run, and its directory for servers
_forking = threading.Lock()
SERVERS = 2  # that fork: forks of one server share addresses and the hash seed


def share_forks() -> None:
    """Let the test processes that this process starts share fork servers."""
    place = Path(tempfile.gettempdir(), f"s3cache-forks-{secrets.token_hex(8)}")
    os.environ[_FORKS] = f"{os.getpid()}:{place}"


@cache
def _forks(number: int) -> Forks:
    """Return a server that forks for test machines."""
    if _FORKS not in os.environ:
        share_forks()
    owner, _, place = os.environ[_FORKS].partition(":")
    return Forks(testing.Machine(f"{place}/{number}", **_OURS), int(owner))


def remote_url(root: Path) -> str:
    """Return the URL of a remote below ``root`` that any machine may read and write."""
    return f"file://{root}/remote?create=1"


class Machine:
    """A :class:`s3cache.testing.Machine` for jobs in this repository.

    Args:
        root: the directory of everything that s3cache and torch write.
        environment: variables of all its processes, besides those of a fresh machine.
    """

    def __init__(self, root: Path, **environment: str) -> None:
        self.root = root
        self._machine = testing.Machine(root, **{**_OURS, **environment})

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
        server: int | None = None,
    ) -> Outcome:
        """Call ``job(*arguments)`` in a new process, within ``s3cache.enabled(remote)``.

        Without ``remote``, the job enables s3cache itself, or leaves it alone.

        Args:
            server: the number of a server, to start as a fork of it, with torch's compiler imported
                (:mod:`tests.support.forking`); numbers that differ by one are different servers. If
                torch would see a difference in the machine's environment, it is a new Python.

        Raises:
            s3cache.testing.ProgramError: the process failed; has the end of its output.
        """
        if server is not None:
            with _forking:  # threads may start machines
                python = _forks(server % SERVERS).python(self.environment)
        return self._machine.call(
            "tests.support.machines:do_job",
            *(job, arguments, remote, settings or {}),
            cwd=self.root,
            timeout_s=timeout_s,
            python=python,
        )


def do_job(job: str, arguments: list[Any], remote: str | None, settings: dict[str, Any]) -> Any:
    """Call the job, in the new process."""
    module, _, name = job.partition(":")
    function = getattr(importlib.import_module(module), name)
    if remote is None:
        return function(*arguments)

    import s3cache

    with s3cache.enabled(remote, **settings) as cache:
        assert s3cache.active() is cache, f"{job}: this torch is not supported"
        result = function(*arguments)
        report = cache.flush(60)
        assert not report.remaining, report
        return result
