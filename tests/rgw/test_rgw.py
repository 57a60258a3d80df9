"""S3Store and its processes on a real Ceph RADOS Gateway, which may die."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from s3cache.errors import AccessDeniedError, MissingContainerError, PreconditionError
from s3cache.store import S3Options, S3Store, Store
from tests.support.buckets import RawBucket, retrying
from tests.support.contract import StoreContract
from tests.support.marks import nightly, slow
from tests.support.proxy import Link, Proxy
from tests.support.served import NewMachine, check_all_arrived
from tests.support.worker import key, keys

pytestmark = [pytest.mark.rgw]


@slow
class TestS3OnRGW(StoreContract):
    @pytest.fixture
    async def store(self, s3_options: S3Options) -> AsyncIterator[Store]:
        async with retrying(s3_options) as store:
            yield store

    @pytest.fixture
    def raw(self, s3_options: S3Options) -> RawBucket:
        return RawBucket(s3_options)


@pytest.fixture
async def store(s3_options: S3Options) -> AsyncIterator[S3Store]:
    store = S3Store(replace(s3_options, multipart_bytes=5 << 20))
    yield store
    await store.aclose()


async def test_the_first_create_shows_that_rgw_honours_the_condition(store: S3Store) -> None:
    await store.put("key", b"x", mode="create")
    assert await store.atomic_create()


async def test_a_bucket_with_object_lock_takes_every_kind_of_write(s3_options: S3Options) -> None:
    """Writing, replacing and removing work, also in parts; every version stays."""
    raw = RawBucket(s3_options)
    bucket = f"s3cache-lock-{uuid.uuid4().hex[:12]}"
    raw.client.create_bucket(Bucket=bucket, ObjectLockEnabledForBucket=True)
    retention = {"Mode": "GOVERNANCE", "Days": 1}
    rule = {"ObjectLockEnabled": "Enabled", "Rule": {"DefaultRetention": retention}}
    raw.client.put_object_lock_configuration(Bucket=bucket, ObjectLockConfiguration=rule)
    options = replace(s3_options, bucket=bucket, multipart_bytes=5 << 20, part_bytes=5 << 20)
    store = S3Store(options)
    for name, body in (("small", b"x"), ("large", bytes(11 << 20))):
        await store.put(name, body, mode="create")
        await store.put(name, body[:-1])
        assert await store.get(name) == body[:-1]
        await store.delete(name)
        assert await store.get(name) is None
    versions = raw.client.list_object_versions(Bucket=bucket)
    assert {v["Key"].rpartition("/")[2] for v in versions["Versions"]} == {"small", "large"}
    await store.aclose()


async def test_exactly_one_creator_of_a_large_object_wins(store: S3Store) -> None:
    """RGW ignores the condition at the end of a multipart upload, so one request must create it."""
    bodies = [os.urandom(6 << 20) for _ in range(4)]
    results = await asyncio.gather(
        *(store.put("large", body, mode="create") for body in bodies), return_exceptions=True
    )
    lost = [result for result in results if result is not None]
    assert len(lost) == 3
    assert all(isinstance(error, PreconditionError) for error in lost)
    assert await store.get("large") == bodies[results.index(None)]


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ({"secret_key": "wrong"}, AccessDeniedError, "secret key is wrong"),
        ({"access_key": "nobody"}, AccessDeniedError, "access key is not known"),
        ({"bucket": "s3cache-no-such-bucket"}, MissingContainerError, "does not exist"),
    ],
)
async def test_errors_name_wrong_keys_and_buckets(
    s3_options: S3Options, wrong: dict[str, Any], error: type[Exception], says: str
) -> None:
    store = S3Store(replace(s3_options, **wrong))
    for call in (store.get("key"), store.put("key", b"x"), store.put("key", b"x", mode="create")):
        with pytest.raises(error, match=says):
            await call
    await store.aclose()


async def test_no_region_is_needed(s3_options: S3Options) -> None:
    store = S3Store(replace(s3_options, region=None))
    await store.put("key", b"x")
    assert await store.get("key") == b"x"
    await store.aclose()


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


@slow
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


@nightly
def test_a_large_entry_is_the_same_on_another_machine(new_machine: NewMachine) -> None:
    """It has 200 MiB, the largest size that shares the upload queue, and is read in ranges."""
    name = key("large")
    machine = new_machine(exit_timeout_s=60.0)
    assert machine.run(["save", [name], 200 * MIB], ["flush"])[-1] == "flushed 0"
    lines = new_machine(lookup_timeout_s=60.0).run(["check", [name]])
    assert lines == [f"hit {name} remote"]
