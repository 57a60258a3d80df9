"""Processes, and a real Ceph RADOS Gateway that dies or hangs under them."""

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

import aioboto3
import pytest

from s3cache import frame
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


class Gateway:
    """The gateway of this test run."""

    def __init__(self) -> None:
        self._down = False

    def signal(self, number: signal.Signals) -> None:
        os.kill(int(Path(os.environ["S3CACHE_TEST_RGW_PIDFILE"]).read_text()), number)
        self._down = number is not signal.SIGCONT

    def restart(self) -> None:
        """On the same port, with the data it had."""
        subprocess.run([str(RESTART)], check=True)
        self._down = False

    def bring_back(self) -> None:
        if self._down:
            self.restart()


@pytest.fixture
def gateway(rgw_bucket: S3Options) -> Iterator[Gateway]:
    gateway = Gateway()
    yield gateway
    gateway.bring_back()


@pytest.fixture
def proxy(rgw_bucket: S3Options) -> Iterator[Proxy]:
    with Proxy(urlsplit(str(rgw_bucket.endpoint_url)).port or 80) as proxy:
        yield proxy


@pytest.fixture
def new_machine(tmp_path: Path, rgw_options: S3Options) -> Iterator[NewMachine]:
    """A function that makes a machine with an empty disk."""
    with ExitStack() as machines:
        numbers = itertools.count()

        def new(**options: Any) -> Machine:
            where = {**to_open(rgw_options), **options}
            return machines.enter_context(Machine(tmp_path / f"{next(numbers)}", **where))

        yield new


def to_open(options: S3Options) -> dict[str, Any]:
    """The arguments of ``Cache.open`` that lead there."""
    names = ("endpoint_url", "region", "access_key", "secret_key")
    return {
        "url": f"s3://{options.bucket}/{options.prefix}",
        **{name: getattr(options, name) for name in names},
    }


def all_arrived(machine: Machine, expected: list[str], variants: tuple[str, ...] = ("",)) -> None:
    """A machine with an empty disk reads each entry, byte for byte."""
    lines = machine.run(["check", expected, variants])
    hits = len(expected) * len(variants)
    assert Counter(line.split()[0] for line in lines) == {"hit": hits}, lines


# --- the gateway dies


def test_killed_under_uploads(gateway: Gateway, proxy: Proxy, new_machine: NewMachine) -> None:
    """When it is back, the process goes on by itself and everything arrives."""
    proxy.link = Link(bytes_per_s=2_000_000)
    names = keys(0, 40)
    process = new_machine(endpoint_url=proxy.url).start(
        ["save", names, SIZE], ["hear"], events=True
    )
    process.until("upload done", 3)
    gateway.signal(signal.SIGKILL)
    process.until("upload retried")
    process.until("saved", len(names))
    assert len(process.said("upload done")) < len(names)
    gateway.restart()
    proxy.heal()
    process.until("upload done", len(names))
    process.hear()
    process.finish()
    all_arrived(new_machine(), names)


def test_killed_with_the_process_that_uploads(
    gateway: Gateway, proxy: Proxy, new_machine: NewMachine
) -> None:
    """A whole rack loses power: the next process on the machine uploads what is left."""
    proxy.link = Link(bytes_per_s=2_000_000)
    machine = new_machine(endpoint_url=proxy.url)
    process = machine.start(["save", keys(0, 40), SIZE], events=True)
    process.until("upload done", 3)
    gateway.signal(signal.SIGKILL)
    process.kill()
    acknowledged = process.acknowledged()
    assert machine.pending()
    gateway.restart()
    proxy.heal()
    machine.let_an_hour_pass()
    assert machine.run(["flush"]) == ["flushed 0"]
    assert machine.leftovers() == []
    all_arrived(new_machine(), acknowledged)


# --- the gateway hangs


def test_stopped_under_transfers(gateway: Gateway, proxy: Proxy, new_machine: NewMachine) -> None:
    """Saves are acknowledged all the same, lookups miss in time; later everything completes."""
    proxy.link = Link(bytes_per_s=2_000_000)
    before, during = keys(0, 20, "before"), keys(0, 20, "during")
    process = new_machine(endpoint_url=proxy.url, lookup_timeout_s=0.5).start(
        ["save", before, SIZE],
        ["hear"],
        ["save", during, SIZE],
        ["check", [*keys(0, 1), before[0]]],
        ["say", "waiting"],
        ["hear"],
        ["flush"],
        events=True,
    )
    process.until("saved", len(before))
    process.until("upload done")
    gateway.signal(signal.SIGSTOP)
    proxy.heal()
    process.hear()
    process.until("at waiting")
    assert process.said("miss") == ["miss key-0000 timeout"]
    assert process.said("hit") == [f"hit {before[0]} - local"]
    # All of them before any of them was uploaded.
    assert len(process.said("saved")) == len(before) + len(during)
    assert not any("-during" in line for line in process.said("upload done"))

    gateway.signal(signal.SIGCONT)
    process.hear()
    assert process.finish()[-1] == "flushed 0"
    all_arrived(new_machine(), before + during)


# --- many writers


async def objects(options: S3Options) -> dict[str, bytes]:
    """What is under the prefix, as plain boto finds it."""
    session = aioboto3.Session(options.access_key, options.secret_key)
    async with session.client(
        "s3", region_name=options.region, endpoint_url=options.endpoint_url
    ) as client:
        page = await client.list_objects_v2(Bucket=options.bucket, Prefix=f"{options.prefix}/v1/")
        found = {}
        for each in page["Contents"]:
            answer = await client.get_object(Bucket=options.bucket, Key=each["Key"])
            found[each["Key"]] = await answer["Body"].read()
        return found


async def test_no_variant_is_lost_in_a_race(
    rgw_options: S3Options, new_machine: NewMachine
) -> None:
    """Eight machines save the same keys at once, each in two variants: each is there once."""
    names, variants = keys(0, 12), ("a", "b")
    processes = [
        new_machine(exit_timeout_s=60.0).start(
            ["say", "ready"],
            ["hear"],
            ["save", names, 1_000, variants if number % 2 else variants[::-1]],
        )
        for number in range(8)
    ]
    for process in processes:
        process.until("at ready")
    for process in processes:
        process.hear()
    for process in processes:
        process.finish()
    there = await objects(rgw_options)
    headers = [frame.decode(data).header for data in there.values()]
    assert Counter((header.key, header.variant) for header in headers) == {
        (key, variant): 1 for key in names for variant in variants
    }
    all_arrived(new_machine(), names, variants)


# --- size


@pytest.mark.parametrize(
    "create",
    [
        pytest.param("auto", id="in one request", marks=slow),
        pytest.param("check", id="in parts"),
    ],
)
def test_a_large_entry_is_the_same_on_another_machine(create: str, new_machine: NewMachine) -> None:
    """200 MiB, the largest that shares the upload queue with others; read in ranges."""
    name = key("large")
    machine = new_machine(conditional_create=create, exit_timeout_s=60.0)
    assert machine.run(["save", [name], 200 * MIB], ["flush"])[-1] == "flushed 0"
    lines = new_machine(lookup_timeout_s=60.0).run(["check", [name]])
    assert lines == [f"hit {name} - remote"]
