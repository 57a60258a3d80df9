"""Clients of aioboto3: make, use and replace them. No other module depends on aioboto3."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Awaitable, Callable
from functools import cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from s3cache.errors import ClosedError
from s3cache.store._s3_credentials import Credentials, Pause, new_session, off_loop
from s3cache.store._s3_errors import (
    distrusts_server,
    is_page,
    page_error,
    refuses_credentials,
)
from s3cache.util import __version__
from s3cache.util.logs import quiet_libraries

if TYPE_CHECKING:
    from s3cache.store._options import S3Options

_T = TypeVar("_T")

CHUNK_BYTES = 256 << 10


class Clients:
    """One client at a time, opened by the first call that needs it, and its credentials.

    A call that fails is made again, once, if what the client read has been renewed since: the
    credentials that a server refuses, or the certificates with which it does not trust a server.
    """

    def __init__(self, options: S3Options) -> None:
        self._options = options
        self._client: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening = asyncio.Lock()
        self._closed = False
        self._is_outdated = False
        self._pause = Pause(options)
        has_own = options.access_key is not None or options.anonymous
        self._credentials = None if has_own else Credentials(options)

    async def run(self, work: Callable[[Any], Awaitable[_T]]) -> _T:
        """Return the result of ``work``, which gets the client.

        Raises:
            ClosedError: the store is closed, or in use on another event loop.
            CredentialsError: there are no credentials.
        """
        with quiet_libraries():
            client = await self._get()
            keys = self._credentials and self._credentials.keys
            try:
                return await work(client)
            except Exception as error:
                if not await self._renew(client, keys, error):
                    raise
            return await work(await self._get())

    def forget_failures(self) -> None:
        """Make no pause before the next call loads credentials or certificates again."""
        self._pause.end()
        if self._credentials is not None:
            self._credentials.forget_failures()

    async def aclose(self) -> None:
        self._closed = True
        if self._credentials is not None:
            self._credentials.close()
        async with self._opening:
            client, self._client = self._client, None
            if client is not None:
                await client.close()

    async def _get(self) -> Any:
        loop = asyncio.get_running_loop()
        if self._client is not None and loop is not self._loop:
            raise ClosedError("the store is in use on another event loop; open a store for each")
        if self._credentials is not None and not self._closed:
            await self._credentials.get_frozen_credentials()
        if self._client is not None and not self._is_outdated:
            return self._client
        async with self._opening:
            if self._closed:
                raise ClosedError("the store is closed")
            if self._client is None or self._is_outdated:
                seen = await asyncio.to_thread(self._pause.inputs)
                opened = await off_loop(lambda: _open_client(self._options, self._credentials))
                former, self._client = self._client, opened
                self._loop, self._is_outdated = loop, False
                self._pause.begin(seen, is_first=former is None)
                if former is not None:
                    await former.close()
            return self._client

    async def _renew(self, client: Any, keys: Any, error: Exception) -> bool:
        """Return whether ``error`` may not occur with the present client and credentials."""
        if distrusts_server(error):
            if client is self._client and await self._pause.is_over_or_moot():
                self._is_outdated = True
            return self._is_outdated or client is not self._client
        if self._credentials is None or not refuses_credentials(error):
            return False
        return await self._credentials.replace(keys)


# -- making a client


async def _open_client(options: S3Options, credentials: Credentials | None) -> Any:
    """Return an open aioboto3 client; ``await client.close()`` ends it.

    A client is not bound to a loop before its first request, which opens the connection pool.
    """
    import aioboto3
    import aioboto3.s3.inject  # else the first client would import it
    from aiobotocore.config import AioConfig
    from botocore import UNSIGNED

    await asyncio.sleep(0)  # so that a fork need not wait for the rest too
    s3: dict[str, Any] = {"payload_signing_enabled": True}
    if options.addressing_style != "auto":  # else ~/.aws/config decides
        s3["addressing_style"] = options.addressing_style
    runtime = f"python/{platform.python_version()} {platform.system().lower()}"
    config = AioConfig(
        http_session_cls=_http_session(),
        # RetryingStore does the retries; 1 is the first attempt.
        retries={"total_max_attempts": 1, "mode": "standard"},
        # The signature covers the body's SHA-256, which every server verifies. botocore's own
        # checksums are trailers, which Ceph RGW 16 and others refuse.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3=s3,
        signature_version=UNSIGNED if options.anonymous else None,
        connect_timeout=options.connect_timeout_s,
        read_timeout=options.read_timeout_s,
        max_pool_connections=options.max_pool_connections,
        tcp_keepalive=True,
        proxies={"http": options.proxy, "https": options.proxy} if options.proxy else None,
        # Complete, because botocore would assemble its own for each request.
        user_agent=f"s3cache/{__version__} aioboto3/{aioboto3.__version__} {runtime}",
        parameter_validation=False,  # our parameters are valid
    )
    botocore_session = new_session(options)
    if credentials is not None:
        botocore_session.register_component("credential_provider", credentials)
    session = aioboto3.Session(
        botocore_session=botocore_session,
        aws_access_key_id=options.access_key,
        aws_secret_access_key=options.secret_key,
        aws_session_token=options.session_token,
    )
    session.events.register_last("before-call.s3", _drop_expect)
    session.events.register_last("before-call.s3.HeadBucket", _follow_no_redirect)
    session.events.register_last("before-parse.s3", _refuse_page)
    client = session.client(
        "s3",
        region_name=options.region,
        endpoint_url=options.endpoint,
        verify=options.ca_bundle,
        config=config,
    )
    return await client.__aenter__()


def _drop_expect(params: dict[str, Any], **_: Any) -> None:
    # For a file body botocore adds "Expect: 100-continue", and aiohttp then waits for an answer
    # that some servers and proxies never send. It would also cost a round trip for each write.
    params["headers"].pop("Expect", None)


def _follow_no_redirect(params: dict[str, Any], **_: Any) -> None:
    # After a redirect botocore sends HEAD to find the bucket's region. It would repeat this without
    # end if the answer were another redirect.
    params["context"].setdefault("s3_redirect", {})["redirected"] = True


def _refuse_page(response_dict: dict[str, Any], **_: Any) -> None:
    # botocore would return the page as an object.
    if response_dict["status_code"] in (200, 206) and is_page(response_dict["headers"]):
        getattr(response_dict["body"], "close", bool)()  # a body that was not read
        raise page_error()


@cache
def _http_session() -> Any:
    """Return the class of HTTP sessions for clients, which follow no redirects.

    aiohttp would follow a redirect to any server, with session token and the customer's key.
    """
    from aiobotocore.httpsession import AIOHTTPSession

    class Session(AIOHTTPSession):  # type: ignore[misc]
        async def _get_session(self, proxy_url: str | None) -> Any:
            session = await super()._get_session(proxy_url)
            return SimpleNamespace(request=partial(session.request, allow_redirects=False))

    return Session
