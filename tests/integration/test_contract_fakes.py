"""S3Store obeys the contract of stores on servers that are not plain AWS."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, ClassVar

import pytest

from s3cache.store import RetryingStore, RetryPolicy, S3Options, S3Store, Store
from tests.support.contract import StoreContract
from tests.support.fakes import DirectoryBucket, FakeS3, ObjectLock
from tests.support.marks import slow
from tests.support.processes import KEYS
from tests.support.scripted import ScriptedServer

RETRIES = RetryPolicy(attempts=3, total_timeout_s=40, attempt_timeout_s=20, base_delay_s=0.01)


class RawObjects:
    """The objects in a fake server under a prefix."""

    def __init__(self, fake: FakeS3, spell: Any = str) -> None:
        self.fake, self.spell = fake, spell

    async def read(self, key: str) -> bytes | None:
        return self.fake.objects.get(f"p/{self.spell(key)}")

    async def write(self, key: str, data: bytes) -> None:
        self.fake.objects[f"p/{self.spell(key)}"] = data

    async def remove(self, key: str) -> None:
        self.fake.objects.pop(f"p/{self.spell(key)}", None)

    async def litter(self) -> None:
        for name in ("", "dir/", "a/", "a//b", "/x", "a/~b/c", "~", "x/~y/~z", "k" * 950):
            self.fake.objects[f"p/{name}"] = b""
        self.fake.objects["p2/x"] = b"a neighbour's"


class OnFake(StoreContract):
    secrets = (KEYS["secret_key"],)
    many = 1_050
    bucket = "bucket"
    parts: ClassVar[dict[str, Any]] = {}

    @pytest.fixture
    def raw(self, fake: FakeS3) -> RawObjects:
        return RawObjects(fake)

    @pytest.fixture
    async def store(self, fake: FakeS3, server: ScriptedServer) -> AsyncIterator[Store]:
        server.answer = fake
        options = S3Options(self.bucket, "p", endpoint_url=server.url, **KEYS, **self.parts)
        store = RetryingStore(S3Store(options), RETRIES)
        yield store
        await store.aclose()


@slow
class TestObjectLock(OnFake):
    """Every kind of write is sent with a digest, large objects in parts."""

    big_bytes = (6 << 20) + 3
    many = 30
    parts: ClassVar[dict[str, Any]] = {"part_bytes": 1 << 20, "multipart_bytes": 5 << 20}

    @pytest.fixture
    def fake(self) -> FakeS3:
        return ObjectLock()


class TestDirectoryBucket(OnFake):
    """Listings are complete, and find keys by any prefix."""

    bucket = "bucket--usw2-az1--x-s3"

    @pytest.fixture
    def fake(self) -> FakeS3:
        return DirectoryBucket()

    @pytest.fixture
    def raw(self, fake: FakeS3) -> RawObjects:
        def spell(key: str) -> str:
            directory, slash, name = key.rpartition("/")
            return directory + slash + name.replace(".", "/~", 1)

        return RawObjects(fake, spell)
