"""All checks, in the order in which one fault explains the next."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import AsyncIterator, Iterator

from s3cache._problems import code_of
from s3cache.doctor._check import Check, fault, ok
from s3cache.doctor._machine import check_cpu, check_execution, check_local_dir
from s3cache.doctor._program import check_compiler, check_torch
from s3cache.doctor._remote import check_remote, refused
from s3cache.doctor._setup import check_settings, check_trust
from s3cache.errors import ConfigError, S3CacheError
from s3cache.settings import Settings
from s3cache.store import S3Options, Store, open_store, parse_url
from s3cache.transfer import background

__all__ = ["examine"]


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
        yield from _remote(settings, settings.url, may_write, timeout_s)
    yield from check_local_dir(settings)
    yield from check_execution()
    if programs:
        yield from check_torch()
        yield from check_compiler()
    yield from check_cpu()
    yield from check_trust(settings)


def _remote(settings: Settings, url: str, may_write: bool, timeout_s: float) -> Iterator[Check]:
    location = parse_url(url)
    if isinstance(location, S3Options):
        check = _credentials(location, timeout_s)
        yield check
        if check.verdict == "fault":
            return
    try:
        store = open_store(url)
    except S3CacheError as exc:
        yield refused("remote", exc)
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
