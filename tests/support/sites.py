"""A remote and machines that share it, on which jobs of ``tests.hooks`` run."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from s3cache.entries import JOB_KEYS
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

        The first process of a site is a fork; those that may find what it left share nothing with
        it.
        """
        machine = machines.Machine(self.root, **{**self.environment, **environment})
        forked = self._site.forks and python == sys.executable
        self._site.forks = False
        outcome = machine.run(f"tests.hooks.{job}", *arguments, python=python, forked=forked)
        if isinstance(outcome.result, dict):
            return {**outcome.result, "stderr": outcome.stderr}
        return outcome.result

    def start(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run ``python command`` to its end, good or bad."""
        machine = machines.Machine(self.root, **{**self.environment, **environment})
        return python(*command, env=machine.environment, cwd=self.root, timeout_s=800)


class Site:
    """A remote, and as many machines as a test wants."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.remote = root / "remote"
        self.forks = True  # until a process has run

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
