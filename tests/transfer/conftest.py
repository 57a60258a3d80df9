"""Processes with uploads to one place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from s3cache.tier import DiskTier
from tests.transfer.sites import MIB, Remote, Site

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def remote() -> Remote:
    return Remote()


@pytest.fixture
def new_site(tmp_path: Path, remote: Remote) -> Iterator[Callable[..., Site]]:
    sites: list[Site] = []

    def new(**limits: Any) -> Site:
        tier = None
        if limits.pop("local", True):
            tier = DiskTier(
                tmp_path / "tier", namespace="ns", max_bytes=256 * MIB, max_files=10_000
            )
        sites.append(Site(tier, remote, **limits))
        return sites[-1]

    yield new
    remote.is_open = True
    for site in sites:
        site.close()


@pytest.fixture
def site(new_site: Callable[..., Site]) -> Site:
    return new_site()
