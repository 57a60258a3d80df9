"""Processes use a real Ceph RADOS Gateway that dies."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from s3cache.store import S3Options
from tests.support.marks import slow
from tests.support.processes import Machine
from tests.support.proxy import Link, Proxy
from tests.support.worker import key, keys

pytestmark = [pytest.mark.rgw, slow]

RESTART = Path(__file__).parents[2] / "infra" / "rgw" / "restart.sh"
SIZE = 100_000
MIB = 1 << 20

NewMachine = Callable[..., Machine]


@pytest.fixture
def restart(rgw_bucket: S3Options) -> Iterator[Callable[[], object]]:
    """Return a function that restarts this run's gateway on the same port with its data."""

    def restart() -> object:
        return subprocess.run([str(RESTART)], check=True)

    yield restart
    restart()


@pytest.fixture
def proxy(rgw_bucket: S3Options) -> Iterator[Proxy]:
    with Proxy(urlsplit(str(rgw_bucket.endpoint_url)).port or 80) as proxy:
        yield proxy


@pytest.fixture
def new_machine(tmp_path: Path, rgw_options: S3Options) -> Iterator[NewMachine]:
    """Return a function that makes a machine with an empty disk."""
    with ExitStack() as machines:
        numbers = itertools.count()

        def new(**options: Any) -> Machine:
            where = {**to_open(rgw_options), **options}
            return machines.enter_context(Machine(tmp_path / f"{next(numbers)}", **where))

        yield new


def to_open(options: S3Options) -> dict[str, Any]:
    """Return the arguments of ``Cache.open`` for this store."""
    names = ("endpoint_url", "region", "access_key", "secret_key")
    return {
        "url": f"s3://{options.bucket}/{options.prefix}",
        **{name: getattr(options, name) for name in names},
    }


def check_all_arrived(
    machine: Machine, expected: list[str], variants: tuple[str, ...] = ("",)
) -> None:
    """Check that a machine with an empty disk reads each entry, byte for byte."""
    lines = machine.run(["check", expected, variants])
    hits = len(expected) * len(variants)
    assert Counter(line.split()[0] for line in lines) == {"hit": hits}, lines


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
    assert lines == [f"hit {name} - remote"]
