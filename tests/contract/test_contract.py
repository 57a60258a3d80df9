"""Stores obey their contract: without a server, on servers that are not plain AWS, and on moto.

The wrappers are nested over a store that fails one call in five. ``tests/rgw`` has the contract on
a real server.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from s3cache.store import (
    BreakingStore,
    FileStore,
    MemoryStore,
    MeteredStore,
    RetryingStore,
    RetryPolicy,
    S3Options,
    Store,
    WrapperStore,
)
from s3cache.util.threads import Breaker
from tests.support.buckets import RawBucket, retrying
from tests.support.contract import StoreContract
from tests.support.fakes import DirectoryBucket, FakeS3, ObjectLock
from tests.support.faulty import Fault, FaultyStore
from tests.support.marks import nightly, slow
from tests.support.processes import KEYS
from tests.support.scripted import ScriptedServer

RETRIES = RetryPolicy(
    attempts=30, total_timeout_s=30, attempt_timeout_s=20, base_delay_s=0.0, max_delay_s=0.0
)


class Inner:
    """Access to the store inside a wrapper; it can hold only objects."""

    def __init__(self, store: Store) -> None:
        self.store = store

    async def read(self, key: str) -> bytes | None:
        got = await self.store.get(key)
        return None if got is None else bytes(got)

    async def write(self, key: str, data: bytes) -> None:
        await self.store.put(key, data)

    async def remove(self, key: str) -> None:
        await self.store.delete(key)

    async def litter(self) -> None:
        pass


class TestMemory(StoreContract):
    """A dict has no raw form, so raw access is to the store itself."""

    def wrap(self, store: Store) -> Store:
        return store

    @pytest.fixture
    def memory(self) -> MemoryStore:
        return MemoryStore("contract")

    @pytest.fixture
    async def store(self, memory: MemoryStore) -> AsyncIterator[Store]:
        store = self.wrap(memory)
        yield store
        await store.aclose()

    @pytest.fixture
    def raw(self, memory: MemoryStore) -> Inner:
        return Inner(memory)


class TestWrappers(TestMemory):
    """All wrappers, nested, over a store that fails one call in five."""

    many = 200

    def wrap(self, store: Store) -> Store:
        rates: dict[Fault, float] = {"error": 0.1, "slow": 0.05, "fail_after_commit": 0.1}
        faulty = FaultyStore(store, rates, seed=7, slow_s=0.0005)
        metered = WrapperStore(MeteredStore(faulty))
        return BreakingStore(RetryingStore(metered, RETRIES), Breaker(3, 10))


class Files:
    """The files of a :class:`FileStore`, with a second implementation of its layout."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, key: str) -> Path:
        *parents, last = key.split("/")
        return self.root.joinpath("objects", *(f"{parent}+" for parent in parents), last)

    async def read(self, key: str) -> bytes | None:
        path = self.path(key)
        return path.read_bytes() if path.exists() else None

    async def write(self, key: str, data: bytes) -> None:
        self.path(key).parent.mkdir(parents=True, exist_ok=True)
        self.path(key).write_bytes(data)

    async def remove(self, key: str) -> None:
        self.path(key).unlink()

    async def litter(self) -> None:
        (self.root / "staging" / "0123456789abcdef").write_bytes(b"half of an obj")
        objects = self.root / "objects"
        for name in (
            ".nfs0001",  # deleted while it was open, on NFS
            "Thumbs.db",
            "notes by hand.txt",
            "a+/no key%",
            "a+/.DS_Store",
            "Foreign+/x",
            "dir+/back\nup",
            os.fsdecode(b"no utf-8 \xff"),
        ):
            path = objects / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"not ours")
        (objects / "lost+found").mkdir()
        (objects / "empty+" / "emptier+").mkdir(parents=True)
        (objects / "a link").symlink_to("x")
        (objects / "link").symlink_to("nowhere")
        (objects / "file+").write_bytes(b"a file where a directory is expected")


class TestLocal(StoreContract):
    many = 200  # a listing has no pages

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        # Opening touches the disk, so it is done outside the loop.
        return FileStore(tmp_path / "root")

    @pytest.fixture
    def raw(self, tmp_path: Path) -> Files:
        return Files(tmp_path / "root")


MIB = 1 << 20
IN_PARTS: dict[str, Any] = {"part_bytes": MIB, "multipart_bytes": 5 * MIB}


@nightly
class TestS3OnMoto(StoreContract):
    """Objects over 1 MiB are read in ranges, and objects over 5 MiB are written in parts."""

    secrets = ("testing-secret",)
    big_bytes = 6 * MIB + 3
    many = 110  # more than a page, see conftest.py
    racers = 3  # moto checks and writes without a lock: with more racers, two may win

    @pytest.fixture
    async def store(self, s3_options: S3Options) -> AsyncIterator[Store]:
        async with retrying(replace(s3_options, **IN_PARTS)) as store:
            yield store

    @pytest.fixture
    def raw(self, s3_options: S3Options) -> RawBucket:
        return RawBucket(s3_options)


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
