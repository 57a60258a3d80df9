"""Getting credentials, in bounded time: what helps with it may hang.

botocore asks a program (``credential_process``), the instance's or container's metadata service,
or STS, for as long as they take.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from contextvars import ContextVar
from typing import Any, TypeVar

from s3cache._forks import new_event_loop
from s3cache.store.s3._errors import translate
from s3cache.store.s3._options import S3Options

__all__ = ["bounded_session", "credentials_source"]

_T = TypeVar("_T")

_REAP_S = 2.0
_LOOK_EVERY_S = 0.01

# Child processes started within _within().
_children: ContextVar[list[Any] | None] = ContextVar("children", default=None)


def bounded_session(timeout_s: float) -> Any:
    """One of aiobotocore's sessions that gets and renews credentials in ``timeout_s``.

    What takes longer fails as credentials that cannot be retrieved, and the processes that were
    started for it are killed and reaped.
    """
    from aiobotocore.session import AioSession

    class Session(AioSession):  # type: ignore[misc]
        async def get_credentials(self) -> Any:
            found = await _within(timeout_s, super().get_credentials())
            renew = getattr(found, "_refresh_using", None)
            if renew is not None and not isinstance(renew, _BoundedRefresh):
                found._refresh_using = _BoundedRefresh(renew, timeout_s)
            return found

    return Session()


class _BoundedRefresh:
    def __init__(self, renew: Any, timeout_s: float) -> None:
        self._renew = renew
        self._timeout_s = timeout_s

    async def __call__(self) -> Any:
        return await _within(self._timeout_s, self._renew())


async def _within(timeout_s: float, work: Awaitable[_T]) -> _T:
    from botocore.exceptions import CredentialRetrievalError

    children: list[Any] = []
    _note_children(asyncio.get_running_loop())
    token = _children.set(children)
    try:
        return await asyncio.wait_for(work, timeout_s)
    except asyncio.TimeoutError:
        raise CredentialRetrievalError(
            provider="credential_process, metadata service or STS",
            error_msg=f"no answer within {timeout_s:.3g} s",
        ) from None
    finally:
        _children.reset(token)
        await _reap([child for child in children if child.get_returncode() is None])


def _note_children(loop: Any) -> None:
    """Have the loop, which is one of ours, tell of each process that is started on it."""
    if "subprocess_exec" in vars(loop):
        return
    start = loop.subprocess_exec

    async def started(*arguments: Any, **options: Any) -> Any:
        transport, protocol = await start(*arguments, **options)
        children = _children.get()
        if children is not None:
            children.append(transport)
        return transport, protocol

    loop.subprocess_exec = started


async def _reap(children: list[Any]) -> None:
    end = time.monotonic() + _REAP_S
    for child in children:
        child.kill()
    # Its public interface tells nobody.
    while time.monotonic() < end and any(child.get_returncode() is None for child in children):  # noqa: ASYNC110
        await asyncio.sleep(_LOOK_EVERY_S)
    for child in children:
        child.close()


def credentials_source(options: S3Options, timeout_s: float) -> str | None:
    """Where the credentials of a client would come from; ``None`` if there are none.

    For a thread of its own: it imports botocore, and runs an event loop.

    Raises:
        AccessDeniedError: they cannot be had, within ``timeout_s``.
        PermanentError: botocore cannot use its configuration.
    """
    if options.anonymous:
        return "nowhere: requests are anonymous"
    if options.access_key is not None:
        return "the options access_key and secret_key"
    loop = new_event_loop()
    try:
        session = bounded_session(timeout_s)
        if options.profile is not None:
            session.set_config_variable("profile", options.profile)
        found = loop.run_until_complete(session.get_credentials())
        if found is not None:
            loop.run_until_complete(_frozen(found, timeout_s))
    except Exception as error:
        raise translate(error, op="credentials", store=options.url) from error
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
    return None if found is None else str(found.method)


async def _frozen(credentials: Any, timeout_s: float) -> None:
    """Have those fetched that are fetched when they are first used."""
    await _within(timeout_s, credentials.get_frozen_credentials())
