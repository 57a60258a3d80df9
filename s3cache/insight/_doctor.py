"""Run all checks in the order in which one fault explains the next, and those of the remote."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TypeVar

from s3cache.errors import (
    AccessDeniedError,
    ConfigError,
    MissingContainerError,
    PreconditionError,
    S3CacheError,
    TransientError,
    code_of,
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
from s3cache.tier import background

_T = TypeVar("_T")

#: The object that is written: not the name of an entry, and the same each time.
_PROBE = "s3cache-doctor/probe"
_PROBE_BYTES = 1 << 20
_TRIES = 5
# S3 refuses requests that differ by 15 minutes:
# https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html (RequestTimeTooSkewed)
_SKEW_S = 900.0
_SKEW_WARNED_S = 60.0


def examine(
    url: str | None = None,
    *,
    may_write: bool = True,
    programs: bool = True,
    timeout_s: float = 15.0,
) -> Iterator[Check]:
    """Yield the result of every check, each in bounded time.

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
    checks = check_remote(
        store,
        may_write=may_write and settings.mode in ("read-write", "write-only"),
        is_shared_by_rights=isinstance(location, S3Options),
        timeout_s=timeout_s,
    )

    async def step() -> Check | None:
        return await anext(checks, None)

    try:
        while (found := background().wait(step(), 8 * timeout_s)) is not None:
            yield found
    except concurrent.futures.TimeoutError:
        problem = f"no answer within {8 * timeout_s:g} s"
        yield fault("remote", problem, "check the network", "unavailable")
    finally:
        with contextlib.suppress(concurrent.futures.TimeoutError):
            background().wait(store.aclose(), 5.0)


def _credentials(options: S3Options, timeout_s: float) -> Check:
    """Check where the credentials come from. A program that is asked for them may hang."""
    from s3cache.store.s3 import credentials_source

    fix = "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or anonymous=true"
    try:
        source = background().wait(
            asyncio.to_thread(credentials_source, options, timeout_s), 2 * timeout_s
        )
    except concurrent.futures.TimeoutError:
        fix = "look at the credential_process of the profile, or at the metadata service"
        return fault("credentials", f"not there within {2 * timeout_s:g} s", fix, "denied")
    except S3CacheError as exc:
        return fault("credentials", str(exc), fix, code_of(exc))
    if source is None:
        return fault("credentials", "there are none", fix, "denied")
    return ok("credentials", f"from {source}")


async def check_remote(
    store: Store,
    *,
    may_write: bool = True,
    is_shared_by_rights: bool = True,
    timeout_s: float = 10.0,
    slow_s: float = 0.5,
    now: Callable[[], float] = time.time,
) -> AsyncIterator[Check]:
    """Yield what the credentials can do in a store, how fast it is, and whether clocks agree.

    Args:
        may_write: whether to write and remove an object of our own.
        is_shared_by_rights: whether the store can withhold the right to delete.
        timeout_s: how long any one request may take.
        slow_s: a small request that takes so long is slow.
    """
    data = os.urandom(_PROBE_BYTES)

    async def bounded(work: Awaitable[_T]) -> _T:
        try:
            return await asyncio.wait_for(work, timeout_s)
        except asyncio.TimeoutError:
            raise TransientError(f"no answer within {timeout_s:g} s") from None

    async def list_one() -> Check:
        async def first() -> object:
            async with listing(store, "v1/") as items:
                return await anext(items, None)

        await bounded(first())
        return ok("list", "allowed")

    async def get() -> Check:
        await bounded(store.get(f"{_PROBE}-that-is-not-there"))
        return ok("get", "allowed")

    async def put() -> Check:
        started = time.perf_counter()
        await bounded(store.put(_PROBE, data))
        return ok("put", f"allowed, {_rate(started)}")

    async def conditional_put() -> Check:
        with contextlib.suppress(PreconditionError):
            await bounded(store.put(_PROBE, data, mode="create"))
            problem = "an object that is there was overwritten"
            return fault("conditional put", problem, "use another server")
        if await bounded(store.atomic_create()):
            return ok("conditional put", "the server lets one of several writers win")
        return warning(
            "conditional put",
            "the server ignores If-None-Match: of writers that race, the last one wins",
            "nothing is lost by it; a newer server honours it",
        )

    async def read_back() -> Check:
        started = time.perf_counter()
        found = await bounded(store.get(_PROBE))
        if found is None or bytes(found) != data:
            problem, fix = "is not what was written", "look at what is in between"
            return fault("read back", problem, fix, "corrupt")
        return ok("read back", f"is what was written, {_rate(started)}")

    async def clock() -> Check:
        info = await bounded(store.head(_PROBE))
        apart_s = 0.0 if info is None else now() - info.modified
        text = f"{abs(apart_s):.0f} s {'ahead of' if apart_s > 0 else 'behind'} the store's"
        fix = "have it set by NTP: chrony, or systemd-timesyncd"
        if abs(apart_s) >= _SKEW_S:
            problem = f"is {text}: S3 refuses requests, signatures expire wrongly"
            return fault("clock", problem, fix, "denied")
        if abs(apart_s) >= _SKEW_WARNED_S:
            return warning("clock", f"is {text}", fix)
        return ok("clock", "agrees with the store's")

    async def latency() -> Check:
        times = []
        for _ in range(_TRIES):
            started = time.perf_counter()
            await bounded(store.head(_PROBE))
            times.append(time.perf_counter() - started)
        median_s = sorted(times)[_TRIES // 2]
        text = f"{median_s * 1000:.1f} ms for a small request"
        if median_s >= slow_s:
            fix = "use a bucket in this region, or s3cache pull before the job starts"
            return warning("latency", text, fix, "timeout")
        return ok("latency", text)

    async def delete() -> Check:
        try:
            await bounded(store.delete(_PROBE))
        except AccessDeniedError:
            return ok("delete", "not allowed, as it should be")
        if not is_shared_by_rights:
            return ok("delete", "allowed, as for everybody who may write here")
        return warning(
            "delete",
            "allowed: anyone with these credentials can empty the cache, and training needs no "
            "such right",
            "take s3:DeleteObject away (infra/aws/s3cache-policy.json), unless you operate it",
        )

    reading: dict[Name, Callable[[], Awaitable[Check]]] = {"list": list_one, "get": get}
    writing: dict[Name, Callable[[], Awaitable[Check]]] = {
        "put": put,
        "conditional put": conditional_put,
        "read back": read_back,
        "clock": clock,
        "latency": latency,
        "delete": delete,
    }
    for name, check in {**reading, **(writing if may_write else {})}.items():
        try:
            yield await check()
        except S3CacheError as exc:
            yield _refused(name, exc)
            is_denied = isinstance(exc, AccessDeniedError)
            if name == "put" or (name == "list" and not is_denied):
                return  # nothing after it can go better
    if not may_write:
        yield skipped("put", "not tried: nothing is to be written")


def _refused(name: Name, error: S3CacheError) -> Check:
    """Return the fault that an error of a store is."""
    fix = "see docs/configuration.md"
    if isinstance(error, AccessDeniedError):
        fix = (
            "grant what infra/aws/s3cache-policy.json has; check the credentials and their profile"
        )
    elif isinstance(error, MissingContainerError):
        fix = "make the bucket or directory, or mend the URL"
    elif isinstance(error, TransientError):
        fix = "check the endpoint, the proxy and the network"
    return fault(name, str(error), fix, code_of(error))


def _rate(started: float) -> str:
    elapsed_s = max(time.perf_counter() - started, 1e-6)
    return f"{_PROBE_BYTES / elapsed_s / 1e6:.0f} MB/s"
