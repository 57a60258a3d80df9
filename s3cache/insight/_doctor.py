"""Run all checks in the order in which one fault explains the next, and those of the remote."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from s3cache.errors import (
    AccessDeniedError,
    ConfigError,
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
    failed,
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
        yield failed("settings", exc)
        return
    found = [*check_settings(settings, url)]
    yield from found
    if settings.url is not None and all(check.verdict != "fault" for check in found):
        yield from _examine_remote(settings, settings.url, may_write, timeout_s)
    yield from check_local_dir(settings)
    yield from check_execution()
    if programs:
        yield check_torch()
        yield check_compiler()
    yield check_cpu()
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
        yield failed("remote", exc)
        return
    try:
        yield from check_remote(
            store,
            may_write=may_write and settings.mode in ("read-write", "write-only"),
            is_shared_by_rights=isinstance(location, S3Options),
            timeout_s=timeout_s,
        )
    finally:
        with contextlib.suppress(TransientError):
            _wait(store.aclose(), 5.0)


def _credentials(options: S3Options, timeout_s: float) -> Check:
    """Check where the credentials come from. A program that is asked for them may hang."""
    from s3cache.store import credentials_source

    fix = "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or anonymous=true"
    try:
        source = _wait(asyncio.to_thread(credentials_source, options, timeout_s), 2 * timeout_s)
    except S3CacheError as exc:
        return failed("credentials", exc, f"{fix}; look at the profile's credential_process")
    if source is None:
        return Check("credentials", "fault", "there are none", fix, "denied")
    return Check("credentials", "ok", f"from {source}")


def _wait(work: Coroutine[Any, Any, _T], timeout_s: float) -> _T:
    try:
        return background().wait(work, timeout_s)
    except concurrent.futures.TimeoutError:
        raise TransientError(f"no answer within {timeout_s:g} s") from None


def check_remote(
    store: Store,
    *,
    may_write: bool = True,
    is_shared_by_rights: bool = True,
    timeout_s: float = 10.0,
    slow_s: float = 0.5,
    now: Callable[[], float] = time.time,
) -> Iterator[Check]:
    """Yield what the credentials can do in a store, how fast it is, and whether clocks agree.

    Args:
        may_write: whether to write and remove an object of our own.
        is_shared_by_rights: whether the store can withhold the right to delete.
        timeout_s: how long any one request may take.
        slow_s: a small request that takes so long is slow.
    """
    data = os.urandom(_PROBE_BYTES)

    def wait(work: Coroutine[Any, Any, _T]) -> _T:
        return _wait(work, timeout_s)

    def list_one() -> Check:
        async def first() -> object:
            async with listing(store, "v1/") as items:
                return await anext(items, None)

        wait(first())
        return Check("list", "ok", "allowed")

    def get() -> Check:
        wait(store.get(f"{_PROBE}-that-is-not-there"))
        return Check("get", "ok", "allowed")

    def put() -> Check:
        started = time.perf_counter()
        wait(store.put(_PROBE, data))
        return Check("put", "ok", f"allowed, {_rate(started)}")

    def conditional_put() -> Check:
        with contextlib.suppress(PreconditionError):
            wait(store.put(_PROBE, data, mode="create"))
            problem = "an object that is there was overwritten"
            return Check("conditional-put", "fault", problem, "use another server")
        if wait(store.atomic_create()):
            return Check("conditional-put", "ok", "the server lets one of several writers win")
        problem = "the server ignores If-None-Match: of writers that race, the last one wins"
        fix = "nothing is lost by it; a newer server honours it"
        return Check("conditional-put", "warning", problem, fix)

    def read_back() -> Check:
        started = time.perf_counter()
        found = wait(store.get(_PROBE))
        if found is None or bytes(found) != data:
            problem, fix = "is not what was written", "look at what is in between"
            return Check("read-back", "fault", problem, fix, "corrupt")
        return Check("read-back", "ok", f"is what was written, {_rate(started)}")

    def clock() -> Check:
        info = wait(store.head(_PROBE))
        apart_s = 0.0 if info is None else now() - info.modified
        text = f"is {abs(apart_s):.0f} s {'ahead of' if apart_s > 0 else 'behind'} the store's"
        fix = "have it set by NTP: chrony, or systemd-timesyncd"
        if abs(apart_s) >= _SKEW_S:
            problem = f"{text}: S3 refuses requests, signatures expire wrongly"
            return Check("clock", "fault", problem, fix, "denied")
        if abs(apart_s) >= _SKEW_WARNED_S:
            return Check("clock", "warning", text, fix)
        return Check("clock", "ok", "agrees with the store's")

    def latency() -> Check:
        times = []
        for _ in range(_TRIES):
            started = time.perf_counter()
            wait(store.head(_PROBE))
            times.append(time.perf_counter() - started)
        median_s = sorted(times)[_TRIES // 2]
        text = f"{median_s * 1000:.1f} ms for a small request"
        if median_s >= slow_s:
            fix = "use a bucket in this region, or s3cache pull before the job starts"
            return Check("latency", "warning", text, fix, "timeout")
        return Check("latency", "ok", text)

    def delete() -> Check:
        try:
            wait(store.delete(_PROBE))
        except AccessDeniedError:
            return Check("delete", "ok", "not allowed, as it should be")
        if not is_shared_by_rights:
            return Check("delete", "ok", "allowed, as for everybody who may write here")
        problem = "allowed: anyone with these credentials can empty the cache; training needs none"
        fix = "take s3:DeleteObject away (infra/aws/s3cache-policy.json), unless you operate it"
        return Check("delete", "warning", problem, fix)

    reading: dict[Name, Callable[[], Check]] = {"list": list_one, "get": get}
    writing: dict[Name, Callable[[], Check]] = {
        "put": put,
        "conditional-put": conditional_put,
        "read-back": read_back,
        "clock": clock,
        "latency": latency,
        "delete": delete,
    }
    for name, check in (reading | writing if may_write else reading).items():
        try:
            yield check()
        except S3CacheError as exc:
            yield failed(name, exc)
            is_denied = isinstance(exc, AccessDeniedError)
            if name == "put" or (name == "list" and not is_denied):
                return  # nothing after it can go better
    if not may_write:
        yield Check("put", "skipped", "not tried: nothing is to be written")


def _rate(started: float) -> str:
    elapsed_s = max(time.perf_counter() - started, 1e-6)
    return f"{_PROBE_BYTES / elapsed_s / 1e6:.0f} MB/s"
