"""A root, tiers over it, a small disk, processes that share the root, and uploads."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from s3cache.tier import BackgroundLoop, DiskTier
from tests.tier.sites import MANY, MIB, Remote, Site


@pytest.fixture
def loop() -> Iterator[BackgroundLoop]:
    loop = BackgroundLoop()
    yield loop
    loop.stop()


@pytest.fixture
def open_tier(root: Path) -> Iterator[Callable[..., DiskTier]]:
    tiers = []

    def opened(max_bytes: int = MANY, max_files: int = MANY, at: Path = root) -> DiskTier:
        tiers.append(DiskTier(at, max_bytes=max_bytes, max_files=max_files))
        return tiers[-1]

    yield opened
    for tier in tiers:
        tier.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A separate file system of 1 MiB, which tests may remount."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = os.geteuid() == 0 and shutil.which("mount") is not None
    if mounted:
        command = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "s3cache-test", str(path)]
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    if not mounted:
        pytest.skip("mounting a small tmpfs is not permitted here")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


# -- uploads


@pytest.fixture
def remote() -> Remote:
    return Remote()


@pytest.fixture
def new_site(tmp_path: Path, remote: Remote) -> Iterator[Callable[..., Site]]:
    sites: list[Site] = []

    def new(**limits: Any) -> Site:
        bounds: dict[str, Any] = {"max_bytes": 256 * MIB, "max_files": 10_000}
        has_disk = limits.pop("local", True)
        tier = DiskTier(tmp_path / "tier", namespace="ns", **bounds) if has_disk else None
        sites.append(Site(tier, remote, **limits))
        return sites[-1]

    yield new
    remote.is_open = True
    for site in sites:
        site.close()


@pytest.fixture
def site(new_site: Callable[..., Site]) -> Site:
    return new_site()
