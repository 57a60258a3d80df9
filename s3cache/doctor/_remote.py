"""The remote: can it be reached, and may we do what we need to, and no more?"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from s3cache._problems import code_of
from s3cache.doctor._check import Check, Name, fault, ok, skipped, warning
from s3cache.errors import (
    AccessDeniedError,
    MissingContainerError,
    PreconditionError,
    S3CacheError,
    TransientError,
)
from s3cache.store import Store, listing

__all__ = ["PROBE", "check_remote", "refused"]

_T = TypeVar("_T")

#: The object that is written: under no name of an entry, the same each time.
PROBE = "s3cache-doctor/probe"
_PROBE_BYTES = 1 << 20
_TRIES = 5
# S3 refuses requests that differ by 15 minutes:
# https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html (RequestTimeTooSkewed)
_SKEW_S = 900.0
_SKEW_WARNED_S = 60.0

_POLICIES = "grant what infra/aws/s3cache-policy.json has"


async def check_remote(
    store: Store,
    *,
    may_write: bool = True,
    is_shared_by_rights: bool = True,
    timeout_s: float = 10.0,
    slow_s: float = 0.5,
    now: Callable[[], float] = time.time,
) -> AsyncIterator[Check]:
    """What credentials can do there, how fast it is, and what time it is there.

    Args:
        may_write: whether to write and remove an object of our own.
        is_shared_by_rights: whether a right to delete is one that can be withheld.
        timeout_s: how long any one request may take.
        slow_s: from when on a small request is one that takes long.
    """
    remote = _Remote(store, timeout_s)
    try:
        await remote.bounded(remote.list_one())
        yield ok("list", "allowed")
    except S3CacheError as exc:
        yield refused("list", exc)
        if not isinstance(exc, AccessDeniedError):
            return  # nothing else can go better
    try:
        await remote.bounded(store.get(f"{PROBE}-that-is-not-there"))
        yield ok("get", "allowed")
    except S3CacheError as exc:
        yield refused("get", exc)
    if not may_write:
        yield skipped("put", "not tried: nothing is to be written")
        return
    data = os.urandom(_PROBE_BYTES)
    started = time.perf_counter()
    try:
        await remote.bounded(store.put(PROBE, data))
        yield ok("put", f"allowed, {_rate(len(data), started)}")
    except S3CacheError as exc:
        yield refused("put", exc)
        return
    checks: dict[Name, Callable[[], Awaitable[Check]]] = {
        "conditional put": lambda: remote.conditional(data),
        "read back": lambda: remote.read_back(data),
        "clock": lambda: remote.clock(now),
        "latency": lambda: remote.latency(slow_s),
        "delete": lambda: remote.deletion(is_shared_by_rights),
    }
    for name, check in checks.items():
        try:
            yield await check()
        except S3CacheError as exc:
            yield refused(name, exc)


class _Remote:
    """Checks of a store in which there is the probe. Each raises what the store does."""

    def __init__(self, store: Store, timeout_s: float) -> None:
        self._store = store
        self._timeout_s = timeout_s

    async def bounded(self, work: Awaitable[_T]) -> _T:
        try:
            return await asyncio.wait_for(work, self._timeout_s)
        except asyncio.TimeoutError:
            raise TransientError(f"no answer within {self._timeout_s:g} s") from None

    async def list_one(self) -> object:
        async with listing(self._store, "v1/") as items:
            return await anext(items, None)

    async def conditional(self, data: bytes) -> Check:
        try:
            await self.bounded(self._store.put(PROBE, data, mode="create"))
        except PreconditionError:
            pass
        else:
            return fault(
                "conditional put", "an object that is there was overwritten", "use another server"
            )
        if await self.bounded(self._store.atomic_create()):
            return ok("conditional put", "the server lets one of several writers win")
        return warning(
            "conditional put",
            "the server ignores If-None-Match: of writers that race, the last one wins",
            "nothing is lost by it; a newer server honours it",
        )

    async def read_back(self, data: bytes) -> Check:
        started = time.perf_counter()
        found = await self.bounded(self._store.get(PROBE))
        if found is None or bytes(found) != data:
            problem, fix = "is not what was written", "look at what is in between"
            return fault("read back", problem, fix, "corrupt")
        return ok("read back", f"is what was written, {_rate(len(data), started)}")

    async def clock(self, now: Callable[[], float]) -> Check:
        info = await self.bounded(self._store.head(PROBE))
        apart_s = 0.0 if info is None else now() - info.modified
        text = f"{abs(apart_s):.0f} s {'ahead of' if apart_s > 0 else 'behind'} the store's"
        fix = "have it set by NTP: chrony, or systemd-timesyncd"
        if abs(apart_s) >= _SKEW_S:
            problem = f"is {text}: S3 refuses requests, signatures expire wrongly"
            return fault("clock", problem, fix, "denied")
        if abs(apart_s) >= _SKEW_WARNED_S:
            return warning("clock", f"is {text}", fix)
        return ok("clock", "agrees with the store's")

    async def latency(self, slow_s: float) -> Check:
        times = []
        for _ in range(_TRIES):
            started = time.perf_counter()
            await self.bounded(self._store.head(PROBE))
            times.append(time.perf_counter() - started)
        median_s = sorted(times)[_TRIES // 2]
        text = f"{median_s * 1000:.1f} ms for a small request"
        if median_s >= slow_s:
            fix = "use a bucket in this region, or s3cache pull before the job starts"
            return warning("latency", text, fix, "timeout")
        return ok("latency", text)

    async def deletion(self, is_shared_by_rights: bool) -> Check:
        try:
            await self.bounded(self._store.delete(PROBE))
        except AccessDeniedError:
            return ok("delete", "not allowed, as it should be")
        if not is_shared_by_rights:
            return ok("delete", "allowed, as for everybody who may write here")
        return warning(
            "delete",
            "allowed: whoever has these credentials can empty the cache, and training needs no "
            "such right",
            "take s3:DeleteObject away (infra/aws/s3cache-policy.json), unless you operate it",
        )


def refused(name: Name, error: S3CacheError) -> Check:
    """The fault that an error of a store is."""
    fix = "see docs/configuration.md"
    if isinstance(error, AccessDeniedError):
        fix = f"{_POLICIES}; check the credentials and their profile"
    elif isinstance(error, MissingContainerError):
        fix = "make the bucket or directory, or mend the URL"
    elif isinstance(error, TransientError):
        fix = "check the endpoint, the proxy and the network"
    return fault(name, str(error), fix, code_of(error))


def _rate(size: int, started: float) -> str:
    elapsed_s = max(time.perf_counter() - started, 1e-6)
    return f"{size / elapsed_s / 1e6:.0f} MB/s"
