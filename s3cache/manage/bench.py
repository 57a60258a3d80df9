"""Measure a user's own bucket: its latency and speed, and a first step warm and cold.

All objects are written below a new prefix, ``s3cache-bench-…/`` below the URL's, and are removed at
the end if the credentials may.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeVar
from urllib.parse import urlsplit

from s3cache.errors import AccessDeniedError, ConfigError, MissingContainerError, TransientError
from s3cache.manage._work import open_place, url_of
from s3cache.settings import Settings
from s3cache.store import FileLocation, MemoryLocation, listing, parse_url
from s3cache.tier import background

__all__ = ["PREFIX", "Bench", "Times"]

_T = TypeVar("_T")

#: The names of all objects that a benchmark writes begin so.
PREFIX = "s3cache-bench-"

_SMALL_BYTES = 4 << 10
_SMALL_TRIES = 20
_LARGE_TRIES = 3
_CLOSE_S = 30.0

# The program of a process on an empty machine; it ends with a line of JSON.
_FIRST_STEP = """
import json, sys, time
import torch
import s3cache
cache = s3cache.enable()
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
layers = [torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.LayerNorm(128)]
model = torch.nn.Sequential(*layers, torch.nn.Linear(128, 8)).to(device)
batch = torch.ones(16, 64, device=device)
started = time.perf_counter()
torch.compile(model)(batch).square().sum().backward()
if device == "cuda":
    torch.cuda.synchronize()
step_s = time.perf_counter() - started
report = cache.flush(60)
stats = cache.stats()
print(json.dumps({
    "step_s": step_s, "device": device, "hits": sum(stats.hits.values()),
    "misses": {str(reason): count for reason, count in stats.misses.items()},
    "bypasses": dict(stats.bypass_reasons), "to_upload": report.remaining,
}), file=sys.__stdout__)
"""


@dataclass
class Times:
    """Durations of equal operations in seconds, and the bytes that each moved."""

    seconds: list[float] = field(default_factory=list)
    size: int = 0

    @property
    def median_s(self) -> float:
        return median(self.seconds)

    @property
    def mb_s(self) -> float:
        """Return the speed of the median one in MB/s."""
        return self.size / max(self.median_s, 1e-9) / 1e6

    def as_dict(self) -> dict[str, object]:
        """Return the times as plain data, with their median and speed."""
        found: dict[str, object] = {"median_s": self.median_s, "seconds": self.seconds}
        return {**found, "bytes": self.size, "mb_s": self.mb_s} if self.size else found


class Bench:
    """One benchmark of a remote, in bounded time.

    Attributes:
        prefix: the names of all objects that it writes begin so.

    Args:
        url: the remote; left out, that of the settings.
        size: bytes of a large object.
        timeout_s: the longest that all of it takes; tries that no longer fit are left out.
        advance: called after each try.

    Raises:
        ConfigError: the settings name no remote.
    """

    def __init__(
        self, url: str | None, *, size: int, timeout_s: float, advance: Callable[[int], object]
    ) -> None:
        settings, _ = Settings.load(url)
        self.prefix = f"{PREFIX}{secrets.token_hex(6)}/"
        self._url = _below(url_of(settings), self.prefix)
        self.store = open_place(self._url, to_fill=True).store
        self._size = size
        self._deadline = time.monotonic() + timeout_s
        self._advance = advance

    @staticmethod
    def tries(rounds: int) -> int:
        """Return how many tries there are at most, of storage and of that many rounds."""
        return 3 * _SMALL_TRIES + 2 * _LARGE_TRIES + 2 * rounds

    def close(self) -> None:
        """Close the store."""
        background().wait(self.store.aclose(), _CLOSE_S)

    def storage(self) -> dict[str, Times]:
        """Time small puts and gets, gets of absent objects, large puts and gets, one by one.

        Raises:
            StoreError: the store refuses, or does not answer in time.
        """
        small, large = os.urandom(_SMALL_BYTES), os.urandom(self._size)
        put, get = self.store.put, self.store.get
        self._wait(get("bench/first"))  # which connects, and finds credentials
        return {
            "small_put": self._timed(lambda i: put(f"bench/small-{i}", small)),
            "small_get": self._timed(lambda i: get(f"bench/small-{i}")),
            "miss": self._timed(lambda i: get(f"bench/absent-{i}")),
            "large_put": self._timed(lambda i: put(f"bench/large-{i}", large), self._size),
            "large_get": self._timed(lambda i: get(f"bench/large-{i}"), self._size),
        }

    def _timed(self, call: Callable[[int], Awaitable[object]], size: int = 0) -> Times:
        """Try at least once, and again while ten more tries would fit into the time left."""
        times = Times(size=size)
        for number in range(_LARGE_TRIES if size else _SMALL_TRIES):
            if times.seconds and self._left_s() < 10 * times.seconds[-1]:
                break
            started = time.perf_counter()
            self._wait(call(number))
            times.seconds.append(time.perf_counter() - started)
            self._advance(1)
        return times

    def warm_start(self, rounds: int) -> dict[str, object]:
        """Time the first step of a small model in fresh processes: compiled, then hit.

        Raises:
            ConfigError: a process failed.
            TransientError: a process did not end in time.
        """
        cold: list[dict[str, Any]] = []
        warm: list[dict[str, Any]] = []
        for number in range(rounds):
            started = time.monotonic()
            cold.append(self._first_step(recache=True))
            warm.append(self._first_step(recache=False))
            if number + 1 < rounds and self._left_s() < 1.5 * (time.monotonic() - started):
                break
        cold_s, warm_s = ([float(each["step_s"]) for each in runs] for runs in (cold, warm))
        return {
            **{name: warm[-1][name] for name in ("device", "hits", "misses", "bypasses")},
            "cold": Times(cold_s).as_dict(),
            "warm": Times(warm_s).as_dict(),
            "ratio": median(cold_s) / median(warm_s),
            "to_upload": cold[-1]["to_upload"],
        }

    def _first_step(self, *, recache: bool) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as empty:
            ours = {
                "S3CACHE_URL": self._url,
                "S3CACHE_LOCAL_DIR": os.path.join(empty, "local"),
                "S3CACHE_MODE": "read-write",
                "S3CACHE_SHAPE_PROFILE": "0",
                "S3CACHE_RECACHE": str(int(recache)),
                "TORCHINDUCTOR_CACHE_DIR": os.path.join(empty, "inductor"),
                "TRITON_CACHE_DIR": os.path.join(empty, "triton"),
            }
            try:
                done = subprocess.run(  # noqa: S603 - ourselves
                    [sys.executable, "-W", "ignore", "-c", _FIRST_STEP],
                    env={**os.environ, **ours},
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    timeout=max(self._left_s(), 1.0),
                    check=False,
                )
            except subprocess.TimeoutExpired:
                problem = "the first step did not end in time: raise --timeout"
                raise TransientError(problem) from None
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise ConfigError("the first step", f"cannot be made ({last})", "see s3cache doctor")
        self._advance(1)
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return found

    def clean(self) -> tuple[int, int]:
        """Remove what was written, and return how many objects are gone, and how many are left.

        Raises:
            StoreError: the store cannot answer.
        """

        async def all_names() -> list[str]:
            async with listing(self.store, "") as objects:
                return [info.key async for info in objects]

        names = self._wait(all_names(), _CLOSE_S)
        for gone, name in enumerate(names):
            try:
                self._wait(self.store.delete(name), _CLOSE_S)
            except AccessDeniedError:
                return gone, len(names) - gone
        location = parse_url(self._url)
        if isinstance(location, FileLocation):
            shutil.rmtree(location.path, ignore_errors=True)
        return len(names), 0

    def _left_s(self) -> float:
        return self._deadline - time.monotonic()

    def _wait(self, work: Awaitable[_T], timeout_s: float | None = None) -> _T:
        limit_s = max(self._left_s(), 1.0) if timeout_s is None else timeout_s

        async def bounded() -> _T:
            try:
                return await asyncio.wait_for(work, limit_s)
            except asyncio.TimeoutError:
                raise TransientError("the store does not answer in time", op="bench") from None

        return background().wait(bounded(), None)


def _below(url: str, prefix: str) -> str:
    """Return the URL of ``prefix`` below ``url``, which has to exist."""
    location = parse_url(url)
    if isinstance(location, MemoryLocation):
        raise ConfigError("the store", "is of this process alone", "give the URL of a bucket")
    parts = urlsplit(url)
    parts = parts._replace(path=f"{parts.path.rstrip('/')}/{prefix.rstrip('/')}")
    if isinstance(location, FileLocation):
        if not (location.create or os.path.isdir(location.path)):
            raise MissingContainerError(f"there is no directory {location.path}", op="bench")
        parts = parts._replace(query="create=true")
    return parts.geturl()
