"""Sessions of aiobotocore that go where they were sent only, in bounded memory and time."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from functools import cache
from typing import Any, TypeVar
from urllib.parse import urlsplit

from s3cache.errors import ConfigError, TransientError
from s3cache.store.s3._errors import translate
from s3cache.store.s3._options import S3Options
from s3cache.util.forks import new_event_loop

__all__ = ["credentials_source", "new_session", "run_on_new_loop"]

_T = TypeVar("_T")

# The longest answer that is no object is a page of a listing: a thousand keys of a kilobyte, each
# character of which may be escaped.
_MAX_ANSWER_BYTES = 8 << 20
_READ_BYTES = 64 << 10
_REAP_S = 2.0

# Child processes started by _within().
_children: ContextVar[list[Any] | None] = ContextVar("children", default=None)


def new_session(timeout_s: float) -> Any:
    """Return an aiobotocore session that gets and renews credentials within ``timeout_s``.

    botocore asks a program (``credential_process``), the instance's or container's metadata
    service, or STS, for as long as they take. Here that fails as credentials that cannot be
    retrieved, and a program that was started for it is killed.
    """
    from aiobotocore.config import AioConfig
    from aiobotocore.session import AioSession

    class Config(AioConfig):  # type: ignore[misc]
        def merge(self, other_config: Any) -> Any:
            merged = super().merge(other_config)
            merged.http_session_cls = self.http_session_cls  # which the original leaves out
            return merged

    class Session(AioSession):  # type: ignore[misc]
        async def get_credentials(self) -> Any:
            found = await _within(timeout_s, super().get_credentials())
            renew = getattr(found, "_refresh_using", None)
            if renew is not None and not getattr(renew, "is_bounded", False):

                async def renew_in_time() -> Any:
                    return await _within(timeout_s, renew())

                renew_in_time.is_bounded = True  # type: ignore[attr-defined]
                found._refresh_using = renew_in_time
            return found

    session = Session()
    # Also for the clients that get credentials.
    session.set_default_client_config(Config(http_session_cls=_http_session()))
    return session


def run_on_new_loop(work: Callable[[], Awaitable[_T]]) -> _T:
    """Run ``work`` on a new event loop of this thread."""
    loop = new_event_loop()
    try:
        return loop.run_until_complete(work())
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


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
        running = [child for child in children if child.get_returncode() is None]
        for child in running:
            child.kill()
        end = time.monotonic() + _REAP_S
        while time.monotonic() < end and any(c.get_returncode() is None for c in running):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for child in running:
            child.close()


def _note_children(loop: Any) -> None:
    """Have the loop, which is one of ours, note each process that is started on it."""
    if "subprocess_exec" in vars(loop):
        return
    start = loop.subprocess_exec

    async def started(*arguments: Any, **options: Any) -> Any:
        transport, protocol = await start(*arguments, **options)
        if (children := _children.get()) is not None:
            children.append(transport)
        return transport, protocol

    loop.subprocess_exec = started


def credentials_source(options: S3Options, timeout_s: float) -> str | None:
    """Return where the credentials of a client would come from, or None if there are none.

    For a thread of its own: it imports botocore, and runs an event loop.

    Raises:
        AccessDeniedError: they cannot be had within ``timeout_s``.
        PermanentError: botocore cannot use its configuration.
    """
    if options.anonymous:
        return "nowhere: requests are anonymous"
    if options.access_key is not None:
        return "the options access_key and secret_key"

    async def find() -> Any:
        session = new_session(timeout_s)
        if options.profile is not None:
            session.set_config_variable("profile", options.profile)
        found = await session.get_credentials()
        if found is not None:  # some are only fetched when they are used
            await _within(timeout_s, found.get_frozen_credentials())
        return found

    try:
        found = run_on_new_loop(find)
    except Exception as error:
        raise translate(error, op="credentials", store=options.url) from error
    return None if found is None else str(found.method)


# -- HTTP


@cache
def _http_session() -> Any:
    """Return the class of HTTP sessions that clients are to have.

    They go where they were sent and nowhere else: aiohttp follows a redirect to any server, with
    all headers: signature, session token, the customer's key. Answers other than bodies of objects,
    which botocore reads at once, are read up to a bound.
    """
    from aiobotocore.awsrequest import AioAWSResponse
    from aiobotocore.httpsession import AIOHTTPSession

    class Session(AIOHTTPSession):  # type: ignore[misc]
        async def _get_session(self, proxy_url: str | None) -> Any:
            return _NoRedirectSession(await super()._get_session(proxy_url))

        async def send(self, request: Any) -> Any:
            _check_proxy(self._proxy_config.proxy_url_for(request.url))
            is_object, request.stream_output = request.stream_output, True
            try:
                answer = await super().send(request)
            finally:
                request.stream_output = is_object
            if is_object and answer.status_code < 300:
                return answer
            body = await _read_answer(answer.raw)
            headers = dict(answer.headers)
            if request.method != "HEAD":  # the header need not be there, or be right
                headers["content-length"] = str(len(body))
            return AioAWSResponse(answer.url, answer.status_code, headers, _ReadBody(body))

    return Session


def _check_proxy(proxy: str | None) -> None:
    """Raise ConfigError for a proxy that aiohttp cannot read: its errors repeat the password."""
    from yarl import URL

    if proxy is None:
        return
    try:
        url = URL(proxy)
        # Python reads more strictly than yarl does in some places.
        is_proxy = url.scheme in ("http", "https") and urlsplit(proxy).port == url.explicit_port
        is_proxy = is_proxy and bool(url.host) and "@" not in url.path
    except ValueError:
        is_proxy = False
    if not is_proxy:
        raise ConfigError(
            "option proxy, or HTTP_PROXY or HTTPS_PROXY",
            "is no URL of an HTTP proxy",
            "write it as http://host:port, and '/', '@' and ':' in a password as %2F, %40 and %3A",
        )


class _NoRedirectSession:
    """Passes requests on to aiohttp, without redirects and with a proxy's password in a header.

    The errors of aiohttp have the proxy's URL as it was given.
    """

    def __init__(self, session: Any) -> None:
        self._session = session

    def request(self, method: str, *, proxy: str | None = None, **arguments: Any) -> Any:
        from yarl import URL

        if proxy is not None:
            url = URL(proxy)
            arguments["proxy"] = url.with_user(None)
            if url.user is not None:
                who = base64.b64encode(f"{url.user}:{url.password or ''}".encode()).decode()
                is_plain = arguments["url"].scheme == "http"  # else a tunnel is asked for first
                name = "headers" if is_plain else "proxy_headers"
                given = arguments.get(name) or {}
                arguments[name] = {**given, "Proxy-Authorization": f"Basic {who}"}
        return self._session.request(method, **arguments, allow_redirects=False)


class _ReadBody:
    def __init__(self, body: bytes) -> None:
        self._body = body

    async def read(self) -> bytes:
        return self._body


async def _read_answer(response: Any) -> bytes:
    body = bytearray()
    async with response:
        while chunk := await response.content.read(_READ_BYTES):
            body += chunk
            if len(body) > _MAX_ANSWER_BYTES:
                response.close()
                raise TransientError(
                    f"more than {_MAX_ANSWER_BYTES} bytes come where S3 would answer briefly; "
                    "check that endpoint_url is an S3 server"
                )
    return bytes(body)
