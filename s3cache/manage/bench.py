"""Measure a user's own bucket: its latency and speed, and a first step warm and cold."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar
from urllib.parse import urlsplit

from s3cache.errors import AccessDeniedError, ConfigError, MissingContainerError, TransientError
from s3cache.manage._bulk import open_place, url_of
from s3cache.settings import Settings
from s3cache.store import FileLocation, MemoryLocation, Store, listing, parse_url
from s3cache.tier import background

__all__ = ["bench", "tries"]

_T = TypeVar("_T")

_PREFIX = "s3cache-bench-"
_SMALL_BYTES = 4 << 10
_SMALL_TRIES = 20
_LARGE_TRIES = 3

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


def tries(rounds: int) -> int:
    """Return how many tries there are at most, of storage and of that many rounds."""
    return 3 * _SMALL_TRIES + 2 * _LARGE_TRIES + 2 * rounds


def bench(
    url: str | None, *, size: int, rounds: int, timeout_s: float, advance: Callable[[int], object]
) -> dict[str, Any]:
    """Time requests one by one, and the first step of a small model, compiled and hit.

    All objects are written below a new prefix, ``s3cache-bench-…/`` below the URL's, and are
    removed at the end if the credentials may. Tries that do not fit into ``timeout_s`` are left
    out. With no ``rounds``, each a cold and a warm start in fresh processes, torch is not needed.

    Returns:
        Plain data: ``url``, ``prefix``, ``storage`` with the times of each kind of request,
        ``warm_start`` if there were rounds, and how many objects were ``removed`` and are ``left``.
    """
    prefix = f"{_PREFIX}{secrets.token_hex(6)}/"
    below = _below(url_of(Settings.load(url)[0]), prefix)
    with open_place(below, to_fill=True) as place:
        running = _Bench(below, place.store, size, time.monotonic() + timeout_s, advance)
        found: dict[str, Any] = {"url": place.store.url, "prefix": prefix}
        try:
            found["storage"] = running.storage()
            if rounds:
                found["warm_start"] = running.warm_start(rounds)
        finally:  # however it ends, also by Ctrl-C
            found["removed"], found["left"] = _clean(place.store, below)
    return found


@dataclass(frozen=True)
class _Bench:
    url: str
    store: Store
    size: int
    deadline: float
    advance: Callable[[int], object]

    def storage(self) -> dict[str, dict[str, Any]]:
        small, large = os.urandom(_SMALL_BYTES), os.urandom(self.size)
        put, get = self.store.put, self.store.get
        _wait(get("first"))  # which connects, and finds credentials
        return {
            "small_put": self.timed(lambda i: put(f"small-{i}", small)),
            "small_get": self.timed(lambda i: get(f"small-{i}")),
            "miss": self.timed(lambda i: get(f"absent-{i}")),
            "large_put": self.timed(lambda i: put(f"large-{i}", large), self.size),
            "large_get": self.timed(lambda i: get(f"large-{i}"), self.size),
        }

    def timed(
        self, call: Callable[[int], Coroutine[Any, Any, object]], size: int = 0
    ) -> dict[str, Any]:
        """Try at least once, and again while ten more tries would fit into the time left."""
        seconds: list[float] = []
        for number in range(_LARGE_TRIES if size else _SMALL_TRIES):
            if seconds and self.left_s() < 10 * seconds[-1]:
                break
            started = time.perf_counter()
            _wait(call(number))
            seconds.append(time.perf_counter() - started)
            self.advance(1)
        times: dict[str, Any] = {"median_s": median(seconds), "seconds": seconds}
        if size:
            times |= {"bytes": size, "mb_s": size / max(times["median_s"], 1e-9) / 1e6}
        return times

    def warm_start(self, rounds: int) -> dict[str, Any]:
        runs: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for number in range(rounds):
            started = time.monotonic()
            runs.append((self.first_step(recache=True), self.first_step(recache=False)))
            if number + 1 < rounds and self.left_s() < 1.5 * (time.monotonic() - started):
                break
        seconds = [[float(each["step_s"]) for each in kind] for kind in zip(*runs, strict=True)]
        cold, warm = ({"median_s": median(each), "seconds": each} for each in seconds)
        return {
            **{name: runs[-1][1][name] for name in ("device", "hits", "misses", "bypasses")},
            "cold": cold,
            "warm": warm,
            "ratio": median(seconds[0]) / median(seconds[1]),
            "to_upload": runs[-1][0]["to_upload"],
        }

    def first_step(self, *, recache: bool) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as empty:
            ours = {
                "S3CACHE_URL": self.url,
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
                    timeout=max(self.left_s(), 1.0),
                    check=False,
                )
            except subprocess.TimeoutExpired:
                problem = "the first step did not end in time: raise --timeout"
                raise TransientError(problem) from None
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise ConfigError("the first step", f"cannot be made ({last})", "see s3cache doctor")
        self.advance(1)
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return found

    def left_s(self) -> float:
        return self.deadline - time.monotonic()


def _clean(store: Store, url: str) -> tuple[int, int]:
    """Remove what was written, and return how many objects are gone, and how many are left."""

    async def all_names() -> list[str]:
        async with listing(store, "") as objects:
            return [info.key async for info in objects]

    names = _wait(all_names())
    for gone, name in enumerate(names):
        try:
            _wait(store.delete(name))
        except AccessDeniedError:
            return gone, len(names) - gone
    location = parse_url(url)
    if isinstance(location, FileLocation):
        shutil.rmtree(location.path, ignore_errors=True)
    return len(names), 0


def _wait(work: Coroutine[Any, Any, _T]) -> _T:
    return background().wait(work, None)


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
