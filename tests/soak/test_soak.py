"""A soak of two minutes at night, as it measures memory and time; ``make soak`` takes 30."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak.run import Growth
from tests.support.marks import nightly

RUN = Path(__file__).parents[2] / "infra" / "rgw" / "run.sh"
CANNOT_INSTALL = 75


@nightly
@pytest.mark.timeout(900)
def test_no_entry_is_lost_or_wrong_and_no_process_grows() -> None:
    """The test uses its own gateway, because other tests need the shared one."""
    if os.environ.get("S3CACHE_TEST_RGW") == "off":
        pytest.skip("S3CACHE_TEST_RGW=off, but this test must kill its server")
    command = [str(RUN), sys.executable, "-m", "tests.soak", "--seconds", "120"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    if done.returncode == CANNOT_INSTALL:
        pytest.skip(f"no Ceph RGW, which this test must kill, is available: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| **lost** | 0 |" in done.stdout
    assert "| **wrong** | 0 |" in done.stdout
    assert re.search(r"what happened .* [1-9]\d* server killed", done.stdout), done.stdout


@pytest.mark.parametrize("what", ["memory_mib", "threads", "sockets", "files"])
def test_growth_is_detected(what: str) -> None:
    assert Growth.of(what, [20.0] * 50).is_flat
    assert not Growth.of(what, [float(20 + number) for number in range(100)]).is_flat
