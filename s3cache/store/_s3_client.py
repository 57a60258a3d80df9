"""The one place that knows aioboto3: how clients are made and replaced, and what they may do.

They go where they were sent and nowhere else, in bounded memory and time.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import platform
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, TypeVar
from urllib.parse import urlsplit

from s3cache.errors import ClosedError, ConfigError
from s3cache.store._s3_errors import not_an_s3_answer, translate
from s3cache.store._s3_options import S3Options, partition_region
from s3cache.util import __version__
from s3cache.util.threads import new_event_loop, threads_are_greenlets

_T = TypeVar("_T")

CHUNK_BYTES = 256 << 10
# Where rights are just too narrow, a new client is refused again: so few are made.
_RENEW_EVERY_S = 120.0
# The longest answer that is no object is a page of a listing: a thousand keys of a kilobyte, each
# character of which may be escaped.
_MAX_ANSWER_BYTES = 8 << 20
_REAP_S = 2.0


class Clients:
    """One client at a time, opened by the first call that needs it.

    botocore renews credentials with a date. Others may be renewed from outside: in a file, in the
    environment, by ``aws sso login``. So once they are refused, the next call gets a new client,
    which looks for them again.
    """

    def __init__(
        self,
        options: S3Options,
        *,
        make: Callable[[S3Options], Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._url = options.url  # which may read files
        self._make = make or _new_client
        self._clock = clock
        self._client: Any = None
        self._calls: Counter[Any] = Counter()  # under way, by client
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening = asyncio.Lock()
        self._closed = False
        self._refused = False
        self._renew_from = float("-inf")
        # Those that were given to us do not change.
        self._is_renewable = options.access_key is None and not options.anonymous

    @contextlib.asynccontextmanager
    async def use(self) -> AsyncIterator[Any]:
        """Give the block the client, which stays open until it has ended.

        Raises:
            ClosedError: the store is closed, or in use on another event loop.
        """
        client = await self._get()
        self._calls[client] += 1
        try:
            yield client
        finally:
            self._calls[client] -= 1
            if client is not self._client and self._calls[client] <= 0:
                del self._calls[client]
                await client.close()

    async def _get(self) -> Any:
        loop = asyncio.get_running_loop()
        if self._client is not None and loop is not self._loop:
            raise ClosedError(f"{self._url} is in use on another event loop; open one for each")
        if self._client is not None and not self._refused:
            return self._client
        async with self._opening:
            if self._closed:
                raise ClosedError(f"{self._url} is closed")
            if self._client is None or self._refused:
                former, self._client = self._client, await self._make(self._options)
                self._loop, self._refused = loop, False
                if former is not None and not self._calls[former]:
                    del self._calls[former]
                    await former.close()
            return self._client

    def refuse(self) -> None:
        """Note that the server does not accept the credentials, or that botocore found none."""
        now = self._clock()
        if self._client is not None and self._is_renewable and now >= self._renew_from:
            self._renew_from = now + _RENEW_EVERY_S
            self._refused = True

    async def aclose(self) -> None:
        """Close all; calls under way fail."""
        self._closed = True
        async with self._opening:
            clients = {self._client, *self._calls} - {None}
            self._client = None
            for client in clients:
                await client.close()


# -- making a client


async def _new_client(options: S3Options) -> Any:
    """Return an open aioboto3 client; ``await client.close()`` ends it.

    It is made on another thread with an event loop of its own: importing botocore and reading its
    models takes 0.7 s, during which the caller's loop goes on. Nothing in a client is bound to a
    loop before its first request, which opens the connection pool.
    """
    if threads_are_greenlets():  # which share one thread, where no second loop can run
        return await _open_client(options)
    # All of it on the loop, imports too: a forked child must not inherit half a module.
    return await asyncio.to_thread(run_on_new_loop, lambda: _open_client(options))


def run_on_new_loop(work: Callable[[], Awaitable[_T]]) -> _T:
    """Run ``work`` on a new event loop of this thread."""
    loop = new_event_loop()
    try:
        return loop.run_until_complete(work())
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


async def _open_client(options: S3Options) -> Any:
    import aioboto3
    import aioboto3.s3.inject  # what the first client would import
    from aiobotocore.config import AioConfig
    from botocore import UNSIGNED

    await asyncio.sleep(0)  # a fork need not wait for the rest too
    s3: dict[str, Any] = {"payload_signing_enabled": True}
    if options.addressing_style != "auto":  # else what ~/.aws/config says
        s3["addressing_style"] = options.addressing_style
    runtime = f"python/{platform.python_version()} {platform.system().lower()}"
    config = AioConfig(
        # tenacity owns the retries; 1 is the first try
        retries={"total_max_attempts": 1, "mode": "standard"},
        # The signature covers the body's SHA-256, so that each server verifies it. botocore's own
        # checksums come as trailers, which Ceph RGW 16 and others refuse.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3=s3,
        signature_version=UNSIGNED if options.anonymous else None,
        connect_timeout=options.connect_timeout_s,
        read_timeout=options.read_timeout_s,
        max_pool_connections=options.max_pool_connections,
        tcp_keepalive=True,
        proxies={"http": options.proxy, "https": options.proxy} if options.proxy else None,
        # In full, for botocore would assemble its own for each request.
        user_agent=f"s3cache/{__version__} aioboto3/{aioboto3.__version__} {runtime}",
        parameter_validation=False,  # ours are right
    )
    botocore_session = _new_session(options.read_timeout_s)
    botocore_session.register_component("data_loader", _model_loader())
    session = aioboto3.Session(
        botocore_session=botocore_session,
        profile_name=options.profile,
        aws_access_key_id=options.access_key,
        aws_secret_access_key=options.secret_key,
        aws_session_token=options.session_token,
    )
    session.events.register_last("before-call.s3", _drop_expect)
    session.events.register_last("before-call.s3.HeadBucket", _redirect_no_more)
    if options.endpoint is None:
        session.events.register_first("needs-retry.s3", _stay_in_partition)
    client = session.client(
        "s3",
        region_name=options.region,
        endpoint_url=options.endpoint_url,
        verify=options.ca_bundle,
        config=config,
    )
    return await client.__aenter__()


@cache
def _model_loader() -> Any:
    """Return one loader of botocore for all stores: its models are read once in a process."""
    from botocore.loaders import create_loader

    return create_loader(os.environ.get("AWS_DATA_PATH"))


def _drop_expect(params: dict[str, Any], **_: Any) -> None:
    # A file body makes botocore add "Expect: 100-continue", and aiohttp then waits for an answer
    # that some servers and proxies never give. It would also cost a round trip for each write.
    params["headers"].pop("Expect", None)


def _redirect_no_more(params: dict[str, Any], **_: Any) -> None:
    # By HEAD botocore asks for the region of a bucket that is elsewhere, and would ask again if
    # that were answered by another redirect, and so on.
    params["context"].setdefault("s3_redirect", {})["redirected"] = True


def _stay_in_partition(request_dict: Any, response: Any, operation: Any, **_: Any) -> None:
    """Keep botocore from following S3 to a region of another partition, or to what is no region.

    Another partition is another operator (AWS China is), who would get the session token and the
    customer's key.
    """
    if response is None:  # there was no answer
        return
    answer, context = response[1], request_dict["context"]
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    own = partition_region(context.get("client_region") or "")
    for region in (headers.get("x-amz-bucket-region"), answer.get("Error", {}).get("Region")):
        is_region = region and re.fullmatch(r"[a-z0-9-]{1,63}", region)
        if region and not (is_region and partition_region(region) == own):
            _redirect_no_more(request_dict)
            if operation.name == "HeadBucket":
                headers.pop("x-amz-bucket-region", None)


# Programs that _within() has started.
_programs: ContextVar[list[Any] | None] = ContextVar("programs", default=None)


def _new_session(timeout_s: float) -> Any:
    """Return an aiobotocore session that gets and renews credentials within ``timeout_s``.

    botocore asks a program, a metadata service or STS for as long as they take. Here that fails as
    credentials that cannot be retrieved, and a program that was started for it is killed.
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


async def _within(timeout_s: float, work: Awaitable[_T]) -> _T:
    from botocore.exceptions import CredentialRetrievalError

    programs: list[Any] = []
    _note_programs(asyncio.get_running_loop())
    token = _programs.set(programs)
    try:
        return await asyncio.wait_for(work, timeout_s)
    except asyncio.TimeoutError:
        raise CredentialRetrievalError(
            provider="credential_process, metadata service or STS",
            error_msg=f"no answer within {timeout_s:.3g} s",
        ) from None
    finally:
        _programs.reset(token)
        for program in programs:
            program.close()  # which kills it
        end = time.monotonic() + _REAP_S
        while time.monotonic() < end and any(p.get_returncode() is None for p in programs):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def _note_programs(loop: Any) -> None:
    """Have the loop, which is one of ours, note each process that is started on it."""
    if "subprocess_exec" in vars(loop):
        return
    start = loop.subprocess_exec

    async def started(*arguments: Any, **options: Any) -> Any:
        transport, protocol = await start(*arguments, **options)
        if (programs := _programs.get()) is not None:
            programs.append(transport)
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
        session = _new_session(timeout_s)
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

    aiohttp follows a redirect to any server, with signature, session token and the customer's key:
    these follow none. Answers other than bodies of objects are read up to a bound.
    """
    from aiobotocore.awsrequest import AioAWSResponse
    from aiobotocore.httpsession import AIOHTTPSession

    class Session(AIOHTTPSession):  # type: ignore[misc]
        async def _get_session(self, proxy_url: str | None) -> Any:
            session = await super()._get_session(proxy_url)
            return SimpleNamespace(request=partial(_request, session))

        async def send(self, request: Any) -> Any:
            _check_proxy(self._proxy_config.proxy_url_for(request.url))
            is_object, request.stream_output = request.stream_output, True
            try:
                answer = await super().send(request)
            finally:
                request.stream_output = is_object
            if is_object and answer.status_code < 300:
                return answer
            body = bytearray()
            async with answer.raw as response:
                while chunk := await response.content.read(CHUNK_BYTES):
                    body += chunk
                    if len(body) > _MAX_ANSWER_BYTES:
                        response.close()
                        raise not_an_s3_answer(f"has more than {_MAX_ANSWER_BYTES} bytes")

            async def read() -> bytes:
                return bytes(body)

            headers = {**answer.headers}
            if request.method != "HEAD":  # the header need not be there, or be right
                headers["content-length"] = str(len(body))
            raw = SimpleNamespace(read=read)
            return AioAWSResponse(answer.url, answer.status_code, headers, raw)

    return Session


def _request(session: Any, method: str, *, proxy: str | None = None, **arguments: Any) -> Any:
    """Make a request that follows no redirect, with a proxy's password in no error of aiohttp."""
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
    return session.request(method, **arguments, allow_redirects=False)


def _check_proxy(proxy: str | None) -> None:
    """Raise ConfigError for a proxy that aiohttp cannot read: its errors repeat the password."""
    from yarl import URL

    if proxy is None:
        return
    with contextlib.suppress(ValueError):
        url = URL(proxy)
        # Python reads more strictly than yarl does in some places.
        is_same = urlsplit(proxy).port == url.explicit_port
        if is_same and url.scheme in ("http", "https") and url.host and "@" not in url.path:
            return
    raise ConfigError(
        "option proxy, or HTTP_PROXY or HTTPS_PROXY",
        "is no URL of an HTTP proxy",
        "write it as http://host:port, and '/', '@' and ':' in a password as %2F, %40 and %3A",
    )
