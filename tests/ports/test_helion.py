"""Helion's ``RemoteCacheBackend`` over the cache, through Helion's own functions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ports.installed import machine, needs
from tests.support.machines import remote_url

pytestmark = [needs("helion", "triton"), pytest.mark.timeout(600)]

_JOB = "tests.ports.helion_jobs:configuration"


def test_a_configuration_is_found_on_a_second_machine(tmp_path: Path) -> None:
    """``enable()`` is enough; the newest configuration counts."""
    url = remote_url(tmp_path)
    one = machine(tmp_path / "one", "helion", "triton").run(_JOB, remote=url)
    two = machine(tmp_path / "two", "helion", "triton").run(_JOB, remote=url)
    assert (one.result, two.result) == ([None, "second"], ["second", "second"])
    assert two.stats.ports["helion"].hits["remote"] == 1
