"""The gateway that run.sh starts: it can be killed, stopped and brought back with its data."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from tests.support.waiting import LONG_S

pytestmark = pytest.mark.rgw

RGW = Path(__file__).parents[2] / "infra" / "rgw"

# A gateway of its own: the one that the test run shares must not die under other tests.
needs_gateway = pytest.mark.skipif(
    "S3CACHE_TEST_RGW_ENDPOINT" not in os.environ, reason="no Ceph RGW (make test-rgw)"
)


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[dict[str, str]]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("S3CACHE_TEST_RGW_")}
    environment["S3CACHE_TEST_RGW_DIR"] = str(tmp_path / "rgw")
    for again in (True, True, False):  # as run.sh does: other servers may have one of the ports
        environment["S3CACHE_TEST_RGW_PORT"] = str(random.randrange(10000, 30000, 64))
        done = subprocess.run([str(RGW / "up.sh")], env=environment, check=not again)
        if done.returncode == 0:
            break
        subprocess.run([str(RGW / "down.sh")], env=environment, check=True)
    yield environment
    subprocess.run([str(RGW / "down.sh")], env=environment, check=True)
    assert not (tmp_path / "rgw").exists()
    with pytest.raises(URLError):
        urlopen(endpoint(environment), timeout=LONG_S)


def endpoint(environment: dict[str, str]) -> str:
    return f"http://127.0.0.1:{environment['S3CACHE_TEST_RGW_PORT']}"


def pid(environment: dict[str, str]) -> int:
    return int(Path(environment["S3CACHE_TEST_RGW_DIR"], "rgw.pid").read_text())


def status(environment: dict[str, str]) -> int:
    with urlopen(endpoint(environment), timeout=LONG_S) as response:
        return int(response.status)


@needs_gateway
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
def test_a_killed_or_stopped_gateway_comes_back_as_another_process(
    gateway: dict[str, str], how: signal.Signals
) -> None:
    assert status(gateway) == 200
    before = pid(gateway)
    os.kill(before, how)
    subprocess.run([str(RGW / "restart.sh")], env=gateway, check=True)
    assert pid(gateway) != before
    assert status(gateway) == 200
