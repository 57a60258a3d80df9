"""A remote and machines that share it, on which jobs of ``tests.hooks`` run."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from s3cache.entries import JOB_KEYS
from s3cache.records import JOB
from tests.support import machines
from tests.support.scripts import python


class Machine:
    """A disk, and processes of which each may have an environment of its own."""

    def __init__(self, root: Path, site: Site, **environment: str) -> None:
        self.root = root
        self.environment = environment
        self._site = site

    def run(
        self, job: str, *arguments: Any, python: str = sys.executable, **environment: str
    ) -> Any:
        """What ``tests.hooks.<module>:<function>`` returns; ``stderr`` too, if it is a ``dict``.

        The first processes of a site are forks that share nothing, and those after them are none.
        """
        machine = machines.Machine(self.root, **{**self.environment, **environment})
        number = self._site.next_machine()
        forked = self._site.forks and number < machines.SERVERS and python == sys.executable
        server = number if forked else None
        outcome = machine.run(f"tests.hooks.{job}", *arguments, python=python, server=server)
        if isinstance(outcome.result, dict):
            return {**outcome.result, "stderr": outcome.stderr}
        return outcome.result

    def ranks(self, count: int, job: str, *arguments: Any) -> list[Any]:
        """What each rank of a job returns, all of them on this machine, with a time-out.

        Each is a fork, as few tests are about what starts them; one thread computes, as torchrun
        has it.
        """
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        shared = machines.Machine(self.root, **self.environment).environment
        world = {"WORLD_SIZE": f"{count}", "LOCAL_WORLD_SIZE": f"{count}"}
        world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
        world[JOB] = f"{port}"  # they have no parent in common
        first = self._site.next_machine()

        def run(rank: int) -> Any:
            own = {**shared, **world, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}
            return (
                machines.Machine(self.root / f"rank-{rank}", **own)
                .run(f"tests.hooks.{job}", *arguments, server=(first + rank) % machines.SERVERS)
                .result
            )

        with ThreadPoolExecutor(count) as pool:
            return [*pool.map(run, range(count))]

    def start(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run ``python command`` to its end, good or bad."""
        machine = machines.Machine(self.root, **{**self.environment, **environment})
        return python(*command, env=machine.environment, cwd=self.root, timeout_s=800)


class Site:
    """A remote, and as many machines as a test wants."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.remote = root / "remote"
        self.forks = True  # where it does not matter what imports torch
        self._started = 0

    def next_machine(self) -> int:
        """How many processes, or jobs of ranks, were started before this one."""
        self._started += 1
        return self._started - 1

    @property
    def url(self) -> str:
        return f"file://{self.remote}?create=1"

    def machine(self, name: str, **environment: str) -> Machine:
        return Machine(self.root / name, self, **environment)

    def copy(self, root: Path) -> Site:
        """Another site with what this one's remote holds."""
        shutil.copytree(self.remote, root / "remote")
        return Site(root)

    def entries(self) -> list[Path]:
        """The files of the remote but for job profiles, the oldest first."""
        files = (path for path in (self.remote / "objects").rglob("*") if path.is_file())
        found = [path for path in files if JOB_KEYS not in path.name]
        return sorted(found, key=lambda path: path.stat().st_mtime_ns)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Site, Any]]:
    """The site on which a job of ``jobs`` ran first, and what it returned; made once each."""
    made: dict[str, tuple[Site, Any]] = {}

    def run(job: str, **environment: str) -> tuple[Site, Any]:
        if job not in made:
            site = Site(tmp_path_factory.mktemp(job))
            made[job] = site, site.machine("writer", **environment).run(f"jobs:{job}", site.url)
        return made[job]

    return run
