"""Caches on servers with habits of their own: nothing is lost, and all is found."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from s3cache import Cache, entries
from s3cache.cache import Hit
from s3cache.insight import examine
from s3cache.store import RetryPolicy, S3Options, S3Store
from tests.support.caching import entry
from tests.support.fakes import (
    DirectoryBucket,
    FakeS3,
    ObjectLock,
    OneWriteASecond,
    SmallBodies,
    TwoBackEnds,
    serving,
)
from tests.support.marks import slow
from tests.support.processes import KEYS

RETRIES = RetryPolicy(attempts=4, total_timeout_s=10, attempt_timeout_s=10)
EXPRESS = "bucket--usw2-az1--x-s3"
NewMachine = Callable[..., Cache]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def machines(tmp_path: Path, stack: ExitStack) -> Callable[..., NewMachine]:
    """Return a function that starts a fake; it returns a function that opens caches on it, each
    with an empty disk."""
    numbers = itertools.count()

    def start(fake: FakeS3, bucket: str = "bucket") -> NewMachine:
        url = stack.enter_context(serving(fake))

        def new(**options: Any) -> Cache:
            local = str(tmp_path / f"{next(numbers)}")
            more: dict[str, Any] = {**KEYS, "endpoint_url": url, "local_dir": local, **options}
            return stack.enter_context(Cache.open(f"s3://{bucket}/p", **more))

        return new

    return start


def open_store(fake_url: str, bucket: str = "bucket", **options: Any) -> S3Store:
    return S3Store(S3Options(bucket, "p", endpoint_url=fake_url, **KEYS, **options))


def kept(fake: FakeS3) -> set[tuple[str, str]]:
    """Return key and variant of each entry in the bucket."""
    found = set()
    for path, data in fake.objects.items():
        name = path.removeprefix("p/")
        if name.startswith(entries.NAMES):
            header = entries.verify(name, data).header
            found.add((header.key, header.variant))
    return found


# -- one write of an object a second


def test_machines_that_start_together_upload_everything(
    machines: Callable[..., NewMachine],
) -> None:
    """Each writes a few objects of its own, and all write some objects."""
    fake = OneWriteASecond()
    new = machines(fake)
    fleet = [new() for _ in range(8)]
    expected = set()
    for number, machine in enumerate(fleet):
        for key in ("all0", "all1", f"own{number}a", f"own{number}b"):
            machine.save(key, entry(key))
            expected.add((key, ""))
    assert all(machine.flush(20).complete for machine in fleet)
    assert kept(fake) == expected
    assert {path.partition("/")[2][:3] for path in fake.objects} == {entries.NAMES}
    assert len(fake.objects) == len(expected)


@pytest.mark.parametrize(
    "kind",
    [DirectoryBucket, *(pytest.param(kind, marks=slow) for kind in (OneWriteASecond, ObjectLock))],
)
def test_the_doctor_finds_no_fault(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, kind: type[FakeS3]
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEYS["access_key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEYS["secret_key"])
    monkeypatch.setenv("S3CACHE_LOCAL", "0")
    fake, bucket = kind(), EXPRESS if kind is DirectoryBucket else "bucket"
    url = f"s3://{bucket}/p?endpoint_url={stack.enter_context(serving(fake))}&region=us-east-1"
    checks = {check.name: check for check in examine(url, programs=False)}
    for name in ("list", "get", "put", "conditional-put", "read-back", "clock", "latency"):
        assert checks[name].verdict == "ok", checks[name]
    assert fake.objects == {}  # these credentials may delete


# -- Object Lock


def test_entries_in_a_locked_bucket_are_saved_replaced_and_removed(
    machines: Callable[..., NewMachine],
) -> None:
    fake = ObjectLock()
    new = machines(fake)
    writer = new()
    for key, variant in (("one", ""), ("one", "v"), ("two", "")):
        writer.save(key, entry(key, variant))
    writer.save("large", entry("large", payload=bytes(range(256)) * (6 << 12)))
    assert writer.flush(20).complete
    assert kept(fake) == {("one", ""), ("one", "v"), ("two", ""), ("large", "")}

    again = new(recache=True)
    again.save("two", entry("two", payload=b"better"))
    assert again.flush(20).complete
    found = new().lookup("two")
    assert isinstance(found, Hit)
    assert bytes(found.entry.section("code")) == b"better"

    again.remove("one")
    assert not isinstance(new().lookup("one"), Hit)
    assert {key for key, _ in kept(fake)} == {"two", "large"}
    locked = [path for path, _ in fake.versions if "/one." in path]
    assert len(set(locked)) == 2  # removing hides an object


@pytest.mark.parametrize(
    "knows", [("x-amz-checksum-sha256",), pytest.param(("content-md5",), marks=slow)]
)
async def test_parts_have_digests_too(stack: ExitStack, knows: tuple[str, ...]) -> None:
    fake = ObjectLock(knows)
    url = stack.enter_context(serving(fake))
    store = open_store(url, multipart_bytes=5 << 20, part_bytes=5 << 20)
    await store.put("large", bytes(11 << 20))
    await store.put("created", bytes(11 << 20), mode="create")
    await store.put("small", b"x", mode="create")
    assert [len(data) for _, data in fake.versions[:2]] == [11 << 20] * 2
    await store.aclose()


# -- directory buckets


def test_a_directory_bucket_serves_all_variants(machines: Callable[..., NewMachine]) -> None:
    """A lookup lists the directory of its key, with no entries of other keys."""
    fake = DirectoryBucket()
    new = machines(fake, EXPRESS)
    writer = new()
    for key, variant in itertools.product(("aa", "aab"), ("", "v1", "v2", "v3")):
        writer.save(key, entry(key, variant))
    assert writer.flush(20).complete
    for variant in ("", "v1", "v2", "v3"):
        found = new().lookup("aa", lambda frame, v=variant: frame.header.variant == v)  # type: ignore[misc]
        assert isinstance(found, Hit), variant
    directories = {path.rpartition("/")[0] for path in fake.objects}
    assert {path.rpartition("/")[2] for path in directories} == {"aa", "aab"}
    writer.remove("aa")
    assert {path.split("/")[-2] for path in fake.objects} == {"aab"}


# -- a server that does not keep its promise


@pytest.mark.parametrize(
    ("ignores_from", "in_turn"),
    [(0, True), (10, False), *(pytest.param(n, n > 0, marks=slow) for n in (1, 0))],
    ids=["in turn", "changes", "in turn, later", "ignores"],
)
def test_no_entry_is_lost_if_servers_ignore_the_condition(
    machines: Callable[..., NewMachine], ignores_from: int, in_turn: bool
) -> None:
    """Machines save different variants under the same keys, at the same time."""
    fake = TwoBackEnds(ignores_from, in_turn=in_turn)
    new = machines(fake)
    fleet = [new() for _ in range(3)]
    expected = set()
    for number, key in itertools.product(range(20), range(len(fleet))):
        machine, variant = fleet[key], f"v{key}"
        machine.save(f"key{number}", entry(f"key{number}", variant))
        expected.add((f"key{number}", variant))
    assert all(machine.flush(20).complete for machine in fleet)
    assert kept(fake) == expected


# -- a limit on bodies


def test_an_entry_that_is_too_large_is_given_up_with_one_warning(
    machines: Callable[..., NewMachine], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """It stays on this machine. Neither this process nor the next sends it again."""
    fake = SmallBodies(20_000)
    new = machines(fake)
    local = str(tmp_path / "shared")
    first = new(local_dir=local)
    large = [f"large{number}" for number in range(3)]
    for key in ("small", *large):
        first.save(key, entry(key, payload=bytes(50_000 if key in large else 10)))
    report = first.flush(20)
    assert (report.remaining, report.too_large, report.complete) == (0, 3, False)
    first.close()
    second = new(local_dir=local)
    assert second.flush(20).complete
    assert kept(fake) == {("small", "")}
    assert len([path for path in fake.writes if "small" in path]) <= 2  # one shows the condition
    assert len([path for path in fake.writes if "large" in path]) == len(large)
    assert all(isinstance(second.lookup(key), Hit) for key in large)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname != "INFO"]
    assert "client_max_body_size" in warning
    assert re.search("an object of 50[0-9]{3} bytes is too large", warning)
