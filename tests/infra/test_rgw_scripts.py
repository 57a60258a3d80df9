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


@needs_gateway
def test_a_port_in_use_is_named(gateway: dict[str, str], tmp_path: Path) -> None:
    second = {**gateway, "S3CACHE_TEST_RGW_DIR": str(tmp_path / "second")}
    done = subprocess.run([str(RGW / "up.sh")], env=second, capture_output=True, check=False)
    assert done.returncode == 1
    assert f"127.0.0.1:{gateway['S3CACHE_TEST_RGW_PORT']} is in use".encode() in done.stderr


@needs_gateway
def test_run_ends_with_the_commands_status_and_leaves_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    show = 'echo "$S3CACHE_TEST_RGW_ENDPOINT $(<"$S3CACHE_TEST_RGW_PIDFILE")"; exit 7'
    done = subprocess.run(
        [str(RGW / "run.sh"), "bash", "-c", show],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 7
    url, process = done.stdout.split()
    with pytest.raises(URLError):
        urlopen(url, timeout=LONG_S)
    assert b"radosgw" not in cmdline(int(process))
    assert list(tmp_path.iterdir()) == []


def cmdline(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""
