"""A remote and machines that share it, on which jobs of ``tests.hooks`` run."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from s3cache.records import JOB
from s3cache.seam import hints
from tests.support import machines
from tests.support.scripts import python


class Machine:
    """A disk, and processes that may each have their own environment."""

    def __init__(self, root: Path, site: Site, **environment: str) -> None:
        self.root = root
        self.environment = environment
        self._site = site

    def run(
        self, job: str, *arguments: Any, python: str = sys.executable, **environment: str
    ) -> Any:
        """Return the result of ``tests.hooks.<module>:<function>``; add ``stderr`` to a ``dict``.

        A process is a fork of another server than the one before it.
        """
        machine = machines.Machine(self.root, **{**self.environment, **environment})
        number = self._site.next_machine()
        server = number if self._site.forks and python == sys.executable else None
        outcome = machine.run(f"tests.hooks.{job}", *arguments, python=python, server=server)
        if isinstance(outcome.result, dict):
            return {**outcome.result, "stderr": outcome.stderr}
        return outcome.result

    def ranks(self, count: int, job: str, *arguments: Any) -> list[Any]:
        """Run the ranks of a job on this machine, with a time-out; return the result of each.

        Ranks are forks: few tests are about how ranks start.
        """
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        shared = machines.Machine(self.root, **self.environment).environment
        world = {"WORLD_SIZE": f"{count}", "LOCAL_WORLD_SIZE": f"{count}"}
        world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
        world[JOB] = f"{port}"  # the ranks have no common parent process
        first = self._site.next_machine()

        def run(rank: int) -> Any:
            own = {**shared, **world, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}
            return (
                machines.Machine(self.root / f"rank-{rank}", **own)
                .run(f"tests.hooks.{job}", *arguments, server=first + rank)
                .result
            )

        with ThreadPoolExecutor(count) as pool:
            return [*pool.map(run, range(count))]

    def start(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run ``python command`` to its end, whether it succeeds or fails."""
        machine = machines.Machine(self.root, **{**self.environment, **environment})
        return python(*command, env=machine.environment, cwd=self.root, timeout_s=800)

    def account(self, program: str, *words: str, **environment: str) -> Any:
        """Run a program; return its last line, parsed as JSON, and ``stderr``."""
        self.root.mkdir(parents=True, exist_ok=True)
        (self.root / "program.py").write_text(program, encoding="utf-8")
        done = self.start("program.py", *words, **environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return {**json.loads(done.stdout.splitlines()[-1]), "stderr": done.stderr}


class Site:
    """A remote and any number of machines."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.remote = root / "remote"
        self.forks = True  # false if it matters what imports torch
        self._started = 0

    def next_machine(self) -> int:
        """Return the number of processes, or jobs of ranks, that were started before this one."""
        self._started += 1
        return self._started - 1

    @property
    def url(self) -> str:
        return f"file://{self.remote}?create=1"

    def machine(self, name: str, **environment: str) -> Machine:
        return Machine(self.root / name, self, **environment)

    def copy(self, root: Path) -> Site:
        """Return another site with a copy of this one's remote."""
        shutil.copytree(self.remote, root / "remote")
        return Site(root)

    def entries(self, *, halves: bool = False) -> list[Path]:
        """Return the files of the remote except frames and hints (job profiles), oldest first.

        With ``halves``, include FX graphs, most of which are also part of a whole graph.
        """
        files = (path for path in (self.remote / "objects").rglob("*") if path.is_file())
        found = [path for path in files if not any(hint in path.name for hint in hints())]
        found = [path for path in found if not path.name.startswith("r")]  # those of frames
        found = [path for path in found if halves or not path.name.startswith("f")]
        return sorted(found, key=lambda path: path.stat().st_mtime_ns)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Site, Any]]:
    """Return a function that runs a job of ``jobs`` once, and returns its site and its result."""
    made: dict[str, tuple[Site, Any]] = {}

    def run(job: str, **environment: str) -> tuple[Site, Any]:
        if job not in made:
            site = Site(tmp_path_factory.mktemp(job))
            made[job] = site, site.machine("writer", **environment).run(f"jobs:{job}", site.url)
        return made[job]

    return run
