"""S3Store obeys the contract of stores on moto, and on servers that are not plain AWS.

``make test`` runs one case of each test on moto with default options. ``make test-all`` runs the
other cases, and one case of each test on a store that reads and writes larger objects in parts.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from s3cache.store import S3Options, Store
from tests.support.buckets import RawBucket, retrying
from tests.support.contract import StoreContract
from tests.support.fakes import DirectoryBucket, FakeS3, ObjectLock
from tests.support.marks import slow
from tests.support.processes import KEYS
from tests.support.scripted import ScriptedServer

MIB = 1 << 20
IN_PARTS: dict[str, Any] = {"part_bytes": MIB, "multipart_bytes": 5 * MIB}


class TestS3OnMoto(StoreContract):
    secrets = ("testing-secret",)
    many = 110  # more than a page, see conftest.py
    racers = 3  # moto checks and writes without a lock: with more racers, two may win
    parts: ClassVar[dict[str, Any]] = {}

    @pytest.fixture
    async def store(self, moto_options: S3Options) -> AsyncIterator[Store]:
        async with retrying(replace(moto_options, **self.parts)) as store:
            yield store

    @pytest.fixture
    def raw(self, moto_options: S3Options) -> RawBucket:
        return RawBucket(moto_options)


@slow
class TestS3InPartsOnMoto(TestS3OnMoto):
    """Objects over 1 MiB are read in ranges, and objects over 5 MiB are written in parts."""

    big_bytes = 6 * MIB + 3
    many = 30
    parts = IN_PARTS


class RawObjects:
    """The objects in a fake server under a prefix."""

    def __init__(self, fake: FakeS3) -> None:
        self.fake = fake

    def path(self, key: str) -> str:
        if isinstance(self.fake, DirectoryBucket):
            directory, slash, name = key.rpartition("/")
            key = directory + slash + name.replace(".", "/~", 1)
        return f"p/{key}"

    async def read(self, key: str) -> bytes | None:
        return self.fake.objects.get(self.path(key))

    async def write(self, key: str, data: bytes) -> None:
        self.fake.objects[self.path(key)] = data

    async def remove(self, key: str) -> None:
        self.fake.objects.pop(self.path(key), None)

    async def litter(self) -> None:
        for name in ("", "dir/", "a/", "a//b", "/x", "a/~b/c", "~", "x/~y/~z", "k" * 950):
            self.fake.objects[f"p/{name}"] = b""
        self.fake.objects["p2/x"] = b"a neighbour's"


class OnFake(StoreContract):
    secrets = (KEYS["secret_key"],)
    many = FakeS3.page + 10
    bucket = "bucket"
    parts: ClassVar[dict[str, Any]] = {}
    kind: ClassVar[type[FakeS3]]

    @pytest.fixture
    def raw(self) -> RawObjects:
        return RawObjects(self.kind())

    @pytest.fixture
    async def store(self, raw: RawObjects, server: ScriptedServer) -> AsyncIterator[Store]:
        server.answer = raw.fake
        options = S3Options(self.bucket, "p", endpoint_url=server.url, **KEYS, **self.parts)
        async with retrying(options) as store:
            yield store


@slow
class TestObjectLock(OnFake):
    """Every kind of write is sent with a digest, large objects in parts."""

    big_bytes = 6 * MIB + 3
    many = 30
    parts = IN_PARTS
    kind = ObjectLock


class TestDirectoryBucket(OnFake):
    """Listings are complete, and find keys by any prefix."""

    bucket = "bucket--usw2-az1--x-s3"
    kind = DirectoryBucket
