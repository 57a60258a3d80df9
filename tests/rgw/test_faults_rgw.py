"""Processes use a real Ceph RADOS Gateway that dies."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from s3cache.store import S3Options
from tests.support.marks import slow
from tests.support.proxy import Link, Proxy
from tests.support.served import NewMachine, check_all_arrived
from tests.support.worker import key, keys

pytestmark = [pytest.mark.rgw, slow]

RESTART = Path(__file__).parents[2] / "infra" / "rgw" / "restart.sh"
SIZE = 100_000
MIB = 1 << 20


@pytest.fixture
def restart(rgw_bucket: S3Options) -> Iterator[Callable[[], object]]:
    """Return a function that restarts this run's gateway on the same port with its data."""

    def restart() -> object:
        return subprocess.run([str(RESTART)], check=True)

    yield restart
    restart()


# --- the gateway dies


def test_uploads_continue_after_the_gateway_was_killed(
    restart: Callable[[], object], proxy: Proxy, new_machine: NewMachine
) -> None:
    """Once the gateway runs again, the process continues by itself, and all entries arrive."""
    proxy.link = Link(bytes_per_s=2_000_000)
    names = keys(0, 40)
    process = new_machine(endpoint_url=proxy.url).start(
        ["save", names, SIZE], ["hear"], events=True
    )
    process.until("upload done", 3)
    os.kill(int(Path(os.environ["S3CACHE_TEST_RGW_PIDFILE"]).read_text()), signal.SIGKILL)
    process.until("upload retried")
    process.until("saved", len(names))
    assert len(process.said("upload done")) < len(names)
    restart()
    proxy.heal()
    process.until("upload done", len(names))
    process.hear()
    process.finish()
    check_all_arrived(new_machine(), names)


# --- size


def test_a_large_entry_is_the_same_on_another_machine(new_machine: NewMachine) -> None:
    """It has 200 MiB, the largest size that shares the upload queue, and is read in ranges."""
    name = key("large")
    machine = new_machine(exit_timeout_s=60.0)
    assert machine.run(["save", [name], 200 * MIB], ["flush"])[-1] == "flushed 0"
    lines = new_machine(lookup_timeout_s=60.0).run(["check", [name]])
    assert lines == [f"hit {name} remote"]
