"""Uploads and downloads of many objects: s3cache against bare aioboto3 and obstore.

All contenders move the same frames, with the same number of requests at once, over connections
that are open already:

s3cache
    Download: ``Cache.prefetch(...).wait()`` into an empty local tier: GET, digests checked, file
    written and counted. Upload: ``Cache.flush()`` of the pending uploads of another process: record
    taken over, file read, digests checked, conditional PUT, record removed. The server is known to
    honour the condition, as AWS is (``conditional_create=native``).
s3cache with checks
    Upload only: as for a server that is not known. It looks for the object before and after each
    PUT: three requests.
s3cache with save
    Upload only: from the first ``Cache.save`` to the end of ``flush``. This includes the durable
    file and the record of each object, which the calling thread writes one after the other.
aioboto3, same work
    ``gather`` under a semaphore. Download: GET, SHA-256 of the body, file written. Upload: file
    read, SHA-256, PUT. Files and digests on threads of ``asyncio.to_thread``; not durable. The
    client has s3cache's settings: pool, signed payload, botocore's own checksums only where
    required.
aioboto3, bytes dropped
    The same without files and digests: downloads are dropped, and uploads come from memory.
obstore, bytes dropped
    The same in Rust: signed payload, one PUT for each object.

On two cores, which the server shares, a download of large objects costs less than their digest and
file. So a contender that drops the bytes is faster than any that keeps them.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import logging
import math
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import aioboto3
import obstore
from _harness import (
    BUCKET,
    Bar,
    Gateway,
    Result,
    cache_without_network,
    incompressible_entry,
    key_of,
    median_ratio,
    shuffled_rounds,
)
from aiobotocore.config import AioConfig
from obstore.store import S3Store

from s3cache import Cache, frame
from s3cache.entries import first_name
from s3cache.settings import Settings
from s3cache.store import parse_url

AT_LEAST = 0.9  # of the throughput of bare aioboto3 doing the same work
PEER = "aioboto3, same work"
_DOWNLOADS = Settings.download_concurrency
_UPLOADS = Settings.upload_concurrency


# The number and the size of objects.
WORKLOADS = {"500 × 64 KiB": (500, 64 << 10), "20 × 16 MiB": (20, 16 << 20)}

Objects = Mapping[str, bytes]  # by cache key


class Contender(Protocol):
    """Both methods begin with a warm-up, and return the seconds after it."""

    def download(self, prefix: str, objects: Objects) -> float: ...

    def upload(self, prefix: str, objects: Objects) -> float: ...


class Roots:
    """Empty directories, removed at the end.

    ext4 without a journal creates files slowly for a minute after many were removed, which would
    slow the next round. But large files are removed at once, as the disk is slow to write them.
    """

    def __init__(self) -> None:
        self._parent = tempfile.TemporaryDirectory()

    def new(self) -> str:
        for path in Path(self._parent.name).rglob("*"):
            if path.is_file() and path.stat().st_size > 1 << 20:
                path.unlink()
        return tempfile.mkdtemp(dir=self._parent.name)


class S3Cache:
    """Measures the cache. With ``saves``, uploads include the saves."""

    def __init__(
        self,
        gateway: Gateway,
        *,
        saves: bool = False,
        downloads: bool = True,
        create: str = "native",
    ) -> None:
        self._gateway = gateway
        self._saves = saves
        self._downloads = downloads
        self._options = {**gateway.options(), "conditional_create": create}
        self._roots = Roots()

    def _open(self, prefix: str, local_dir: str) -> Cache:
        url = self._gateway.url(prefix)
        return Cache.open(url, local_dir=local_dir, strict=True, **self._options)

    def download(self, prefix: str, objects: Objects) -> float:
        if not self._downloads:
            return math.nan
        with self._open(prefix, self._roots.new()) as cache:
            cache.prefetch([f"absent{number}" for number in range(2 * _DOWNLOADS)]).wait()
            started = time.perf_counter()
            report = cache.prefetch(objects).wait()
            elapsed = time.perf_counter() - started
            assert report.found == len(objects), report
        return elapsed

    def upload(self, prefix: str, objects: Objects) -> float:
        root = self._roots.new()
        with self._open(prefix, root) as cache:
            for number in range(2 * _UPLOADS):
                key = f"warm{number}"
                cache.save(key, frame.encode(kind="bench", key=key, sections={}))
            assert cache.flush().complete
            if not self._saves:
                self._leave_on_record(prefix, root, objects)
            started = time.perf_counter()
            for key, data in objects.items() if self._saves else ():
                cache.save(key, data)
            report = cache.flush()
            elapsed = time.perf_counter() - started
            assert report.complete, report
            assert cache.stats().uploaded == len(objects) + 2 * _UPLOADS
        return elapsed

    def _leave_on_record(self, prefix: str, root: str, objects: Objects) -> None:
        """Save the objects like a process that never reached the bucket."""
        url = self._gateway.url(prefix)
        other = cache_without_network(root, parse_url(url, **self._options).identity)
        for key, data in objects.items():
            other.save(key, data)
        other.close(timeout_s=0)
        logging.getLogger("s3cache").setLevel(logging.NOTSET)


class _OnOneLoop:
    """A contender with a client on its own event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    async def get(self, path: str) -> int:
        raise NotImplementedError

    async def put(self, path: str, data: bytes) -> None:
        raise NotImplementedError

    def download(self, prefix: str, objects: Objects) -> float:
        async def absent(path: str) -> None:
            with contextlib.suppress(Exception):
                await self.get(path)

        self._each(absent, [(f"{prefix}/absent",)] * 2 * _DOWNLOADS, _DOWNLOADS)
        started = time.perf_counter()
        paths = [(f"{prefix}/{first_name(key)}",) for key in objects]
        sizes = self._each(self.get, paths, _DOWNLOADS)
        elapsed = time.perf_counter() - started
        assert sum(sizes) == sum(map(len, objects.values()))
        return elapsed

    def upload(self, prefix: str, objects: Objects) -> float:
        warm = [(f"{prefix}/warm{number}", b"") for number in range(2 * _UPLOADS)]
        self._each(self.put, warm, _UPLOADS)
        started = time.perf_counter()
        puts = [(f"{prefix}/{first_name(key)}", data) for key, data in objects.items()]
        self._each(self.put, puts, _UPLOADS)
        return time.perf_counter() - started

    def _each(
        self,
        call: Callable[..., Awaitable[Any]],
        arguments: Iterable[tuple[Any, ...]],
        at_once: int,
    ) -> list[Any]:
        async def everything() -> list[Any]:
            limit = asyncio.Semaphore(at_once)

            async def one(each: tuple[Any, ...]) -> Any:
                async with limit:
                    return await call(*each)

            return await asyncio.gather(*map(one, arguments))

        return self._loop.run_until_complete(everything())


class Aioboto3(_OnOneLoop):
    def __init__(self, gateway: Gateway, config: AioConfig) -> None:
        super().__init__()
        client = aioboto3.Session().client("s3", config=config, **gateway.botocore())
        self._client = self._loop.run_until_complete(client.__aenter__())

    def close(self) -> None:
        self._loop.run_until_complete(self._client.close())

    async def get(self, path: str) -> int:
        response = await self._client.get_object(Bucket=BUCKET, Key=path)
        async with response["Body"] as body:
            return len(await body.read())

    async def put(self, path: str, data: bytes) -> None:
        await self._client.put_object(Bucket=BUCKET, Key=path, Body=data)


class Aioboto3SameWork(Aioboto3):
    def __init__(self, gateway: Gateway, config: AioConfig) -> None:
        super().__init__(gateway, config)
        self._roots = Roots()
        self._root = Path()

    def download(self, prefix: str, objects: Objects) -> float:
        self._root = Path(self._roots.new())
        return super().download(prefix, objects)

    def upload(self, prefix: str, objects: Objects) -> float:
        self._root = Path(self._roots.new())
        for key, data in objects.items():
            self._file(first_name(key)).write_bytes(data)
        return super().upload(prefix, objects)

    async def get(self, path: str) -> int:
        response = await self._client.get_object(Bucket=BUCKET, Key=path)
        async with response["Body"] as body:
            data = await body.read()
        return await asyncio.to_thread(self._keep, path, data)

    async def put(self, path: str, data: bytes) -> None:
        if data:  # not while warming up
            data = await asyncio.to_thread(self._load, path)
        await super().put(path, data)

    def _keep(self, path: str, data: bytes) -> int:
        hashlib.sha256(data)
        return self._file(path).write_bytes(data)

    def _load(self, path: str) -> bytes:
        data = self._file(path).read_bytes()
        hashlib.sha256(data)
        return data

    def _file(self, path: str) -> Path:
        return self._root / path.rpartition("/")[2]


class Obstore(_OnOneLoop):
    def __init__(self, gateway: Gateway) -> None:
        super().__init__()
        self._store = S3Store(
            BUCKET,
            endpoint=gateway.endpoint_url,
            access_key_id=gateway.access_key,
            secret_access_key=gateway.secret_key,
            region="us-east-1",
            client_options={"allow_http": True},
        )

    async def get(self, path: str) -> int:
        response = await obstore.get_async(self._store, path)
        return len(await response.bytes_async())

    async def put(self, path: str, data: bytes) -> None:
        await obstore.put_async(self._store, path, data, use_multipart=False)


def same_settings() -> AioConfig:
    """Return the settings of s3cache's own client."""
    return AioConfig(
        retries={"total_max_attempts": 1, "mode": "standard"},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"payload_signing_enabled": True},
        max_pool_connections=32,
        connect_timeout=5,
        read_timeout=30,
        tcp_keepalive=True,
    )


def measure(gateway: Gateway, rounds: int) -> Result:
    peer, bare = Aioboto3SameWork(gateway, same_settings()), Aioboto3(gateway, same_settings())
    contenders: dict[str, Contender] = {
        "s3cache": S3Cache(gateway),
        PEER: peer,
        "aioboto3, bytes dropped": bare,
        "obstore, bytes dropped": Obstore(gateway),
        "s3cache with save": S3Cache(gateway, saves=True, downloads=False),
        "s3cache with checks": S3Cache(gateway, downloads=False, create="auto"),
    }
    others = [name for name in contenders if name != "s3cache"]
    result = Result(
        "Throughput on Ceph RGW, loopback",
        ["workload", "s3cache", *(f"× {name}" for name in others)],
        notes=[
            f"s3cache's throughput, and its ratio to the others': medians of {rounds} rounds.",
            f"{_DOWNLOADS} downloads or {_UPLOADS} uploads at once.",
            "Same work: SHA-256 and files; those of aioboto3 are neither counted nor durable.",
        ],
    )
    for workload, (count, size) in WORKLOADS.items():
        keys = map(key_of, range(count))
        objects = {key: incompressible_entry(key, size) for key in keys}
        contenders["obstore, bytes dropped"].upload("stored", objects)
        for direction in ("download", "upload"):
            seconds: dict[str, list[float]] = {name: [] for name in contenders}
            for names in shuffled_rounds(list(contenders), rounds):
                for name in names:
                    gc.collect()
                    if direction == "download":
                        elapsed = contenders[name].download("stored", objects)
                    else:
                        elapsed = contenders[name].upload("new", objects)
                        gateway.empty("new/")
                    seconds[name].append(elapsed)
            _add_rows(result, f"{direction} {workload}", count * size, seconds, others)
        gateway.empty()
    peer.close()
    bare.close()
    return result


def _add_rows(
    result: Result, label: str, total: int, seconds: dict[str, list[float]], others: list[str]
) -> None:
    own = seconds["s3cache"]
    ratios = {name: median_ratio(seconds[name], own) for name in others}
    rate = total / statistics.median(own) / 1e6
    result.rows.append([label, f"{rate:.0f} MB/s", *(_ratio(ratios[name]) for name in others)])
    result.bars.append(Bar(f"{label}, × {PEER}", ratios[PEER], "at least", AT_LEAST))
    for name, samples in seconds.items():
        if not math.isnan(samples[0]):
            result.samples[f"{label}, {name}, s"] = samples


def _ratio(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.2f}"
