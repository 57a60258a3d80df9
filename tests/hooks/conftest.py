"""Fixtures of the compile cache's tests."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.hooks.machines import Machine

if TYPE_CHECKING:
    from collections.abc import Callable


class Site:
    """A remote, and as many machines as a test wants."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.remote = root / "remote"

    @property
    def url(self) -> str:
        return f"file://{self.remote}?create=1"

    def machine(self, name: str, **environment: str) -> Machine:
        return Machine(self.root / name, **environment)

    def copy(self, root: Path) -> Site:
        """Another site with what this one's remote holds."""
        shutil.copytree(self.remote, root / "remote")
        return Site(root)

    def entries(self) -> list[Path]:
        """The files of the remote, the oldest first."""
        found = [path for path in (self.remote / "objects").rglob("*") if path.is_file()]
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
