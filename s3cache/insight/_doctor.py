"""Run all checks in the order in which one fault explains the next, and those of the remote."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TypeVar

from s3cache._problems import code_of
from s3cache.errors import (
    AccessDeniedError,
    ConfigError,
    MissingContainerError,
    PreconditionError,
    S3CacheError,
    TransientError,
)
from s3cache.insight._checks import (
    Check,
    Name,
    check_compiler,
    check_cpu,
    check_execution,
    check_local_dir,
    check_settings,
    check_torch,
    check_trust,
    fault,
    ok,
    skipped,
    warning,
)
from s3cache.settings import Settings
from s3cache.store import S3Options, Store, listing, open_store, parse_url
from s3cache.transfer import background

__all__ = ["check_remote", "examine"]


def examine(
    url: str | None = None,
    *,
    may_write: bool = True,
    programs: bool = True,
    timeout_s: float = 15.0,
) -> Iterator[Check]:
    """Look at everything, each thing for a bounded time.

    Args:
        may_write: whether to write an object into the remote, and to try to remove it.
        programs: whether to start torch and the compiler, which takes seconds.
        timeout_s: how long any one request to the remote may take.
    """
    try:
        settings, _ = Settings.load(url)
    except ConfigError as exc:
        yield fault("settings", f"{exc.thing}: {exc.cause}", exc.fix, "ConfigError")
        return
    found = [*check_settings(settings, url)]
    yield from found
    if settings.url is not None and all(check.verdict != "fault" for check in found):
        yield from _examine_remote(settings, settings.url, may_write, timeout_s)
    yield from check_local_dir(settings)
    yield from check_execution()
    if programs:
        yield from check_torch()
        yield from check_compiler()
    yield from check_cpu()
    yield from check_trust(settings)


def _examine_remote(
    settings: Settings, url: str, may_write: bool, timeout_s: float
) -> Iterator[Check]:
    location = parse_url(url)
    if isinstance(location, S3Options):
        check = _credentials(location, timeout_s)
        yield check
        if check.verdict == "fault":
            return
    try:
        store = open_store(url)
    except S3CacheError as exc:
        yield _refused("remote", exc)
        return
    may_write = may_write and settings.mode in ("read-write", "write-only")
    checks = check_remote(
        store,
        may_write=may_write,
        is_shared_by_rights=isinstance(location, S3Options),
        timeout_s=timeout_s,
    )
    try:
        yield from _one_by_one(checks, 8 * timeout_s)
    finally:
        _close(store)


def _credentials(options: S3Options, timeout_s: float) -> Check:
    """Where the credentials come from. A program that is asked for them may hang."""
    from s3cache.store.s3 import credentials_source

    try:
        source = background().wait(
            asyncio.to_thread(credentials_source, options, timeout_s), 2 * timeout_s
        )
    except concurrent.futures.TimeoutError:
        return fault(
            "credentials",
            f"not there within {2 * timeout_s:g} s",
            "look at the credential_process of the profile, or at the metadata service",
            "denied",
        )
    except S3CacheError as exc:
        return fault(
            "credentials",
            str(exc),
            "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and its secret",
            code_of(exc),
        )
    if source is None:
        return fault(
            "credentials",
            "there are none",
            "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or anonymous=true",
            "denied",
        )
    return ok("credentials", f"from {source}")


def _one_by_one(checks: AsyncIterator[Check], timeout_s: float) -> Iterator[Check]:
    async def step() -> Check | None:
        return await anext(checks, None)

    while True:
        try:
            check = background().wait(step(), timeout_s)
        except concurrent.futures.TimeoutError:
            problem = f"no answer within {timeout_s:g} s"
            yield fault("remote", problem, "check the network", "unavailable")
            return
        if check is None:
            return
        yield check


def _close(store: Store) -> None:
    try:
        background().wait(store.aclose(), 5.0)
    except concurrent.futures.TimeoutError:  # nobody waits for it
        return


# -- the remote: can it be reached, and may we do what we need to, and no more?


_T = TypeVar("_T")

#: The object that is written: under no name of an entry, the same each time.
_PROBE = "s3cache-doctor/probe"
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
        yield _refused("list", exc)
        if not isinstance(exc, AccessDeniedError):
            return  # nothing else can go better
    try:
        await remote.bounded(store.get(f"{_PROBE}-that-is-not-there"))
        yield ok("get", "allowed")
    except S3CacheError as exc:
        yield _refused("get", exc)
    if not may_write:
        yield skipped("put", "not tried: nothing is to be written")
        return
    data = os.urandom(_PROBE_BYTES)
    started = time.perf_counter()
    try:
        await remote.bounded(store.put(_PROBE, data))
        yield ok("put", f"allowed, {_rate(len(data), started)}")
    except S3CacheError as exc:
        yield _refused("put", exc)
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
            yield _refused(name, exc)


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
            await self.bounded(self._store.put(_PROBE, data, mode="create"))
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
        found = await self.bounded(self._store.get(_PROBE))
        if found is None or bytes(found) != data:
            problem, fix = "is not what was written", "look at what is in between"
            return fault("read back", problem, fix, "corrupt")
        return ok("read back", f"is what was written, {_rate(len(data), started)}")

    async def clock(self, now: Callable[[], float]) -> Check:
        info = await self.bounded(self._store.head(_PROBE))
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
            await self.bounded(self._store.head(_PROBE))
            times.append(time.perf_counter() - started)
        median_s = sorted(times)[_TRIES // 2]
        text = f"{median_s * 1000:.1f} ms for a small request"
        if median_s >= slow_s:
            fix = "use a bucket in this region, or s3cache pull before the job starts"
            return warning("latency", text, fix, "timeout")
        return ok("latency", text)

    async def deletion(self, is_shared_by_rights: bool) -> Check:
        try:
            await self.bounded(self._store.delete(_PROBE))
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


def _refused(name: Name, error: S3CacheError) -> Check:
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
