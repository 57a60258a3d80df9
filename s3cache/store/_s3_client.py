"""The one place that knows aioboto3: how clients are made, used and replaced."""

from __future__ import annotations

import asyncio
import os
import platform
import time
from collections.abc import Awaitable, Callable
from functools import cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from s3cache.errors import ClosedError
from s3cache.store._s3_errors import translate
from s3cache.util import __version__
from s3cache.util.threads import new_event_loop, threads_are_greenlets

if TYPE_CHECKING:
    from s3cache.store._url import S3Options

_T = TypeVar("_T")

CHUNK_BYTES = 256 << 10
# Where rights are just too narrow, a new client is refused again: so few are made.
_RENEW_EVERY_S = 120.0
# For opening a client, which may ask for credentials on a thread that the exit waits for.
_OPEN_TIMEOUT_S = 30.0
# What S3Store reads of the answers to the requests of which there are many.
_READ_OF_GET, _READ_OF_PUT = {"Body", "ContentLength", "ContentRange", "ETag"}, {"ETag"}


class Clients:
    """One client at a time, opened by the first call that needs it.

    botocore renews credentials with a date. Others may be renewed from outside: in a file, in the
    environment, by ``aws sso login``. So once they are refused, the next call gets a new client,
    which looks for them again. Calls under way with the former one fail, and may be tried again.
    """

    def __init__(self, options: S3Options) -> None:
        self._options = options
        self._client: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening = asyncio.Lock()
        self._closed = False
        self._refused = False
        self._renew_from = float("-inf")
        # Those that were given to us do not change.
        self._is_renewable = options.access_key is None and not options.anonymous

    async def get(self) -> Any:
        """Return the client.

        Raises:
            ClosedError: the store is closed, or in use on another event loop.
        """
        loop = asyncio.get_running_loop()
        if self._client is not None and loop is not self._loop:
            raise ClosedError("the store is in use on another event loop; open one for each")
        if self._client is not None and not self._refused:
            return self._client
        async with self._opening:
            if self._closed:
                raise ClosedError("the store is closed")
            if self._client is None or self._refused:
                former, self._client = self._client, await _new_client(self._options)
                self._loop, self._refused = loop, False
                if former is not None:
                    await former.close()
            return self._client

    def refuse(self) -> None:
        """Note that the server does not accept the credentials, or that botocore found none."""
        now = time.monotonic()
        if self._client is not None and self._is_renewable and now >= self._renew_from:
            self._renew_from = now + _RENEW_EVERY_S
            self._refused = True

    async def aclose(self) -> None:
        self._closed = True
        async with self._opening:
            client, self._client = self._client, None
            if client is not None:
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
    return await asyncio.to_thread(_run_on_new_loop, lambda: _open_client(options))


def _run_on_new_loop(work: Callable[[], Awaitable[_T]]) -> _T:
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
        http_session_cls=_http_session(),
        # RetryingStore owns the retries; 1 is the first try.
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
    session = aioboto3.Session(
        botocore_session=_session(options),
        aws_access_key_id=options.access_key,
        aws_secret_access_key=options.secret_key,
        aws_session_token=options.session_token,
    )
    session.events.register_last("before-call.s3", _drop_expect)
    session.events.register_last("before-call.s3.HeadBucket", _follow_no_redirect)
    client = session.client(
        "s3",
        region_name=options.region,
        endpoint_url=options.endpoint,
        verify=options.ca_bundle,
        config=config,
    )
    return await _within(_OPEN_TIMEOUT_S, client.__aenter__())


def _session(options: S3Options) -> Any:
    from aiobotocore.session import AioSession

    session = AioSession(profile=options.profile)
    session.register_component("data_loader", _model_loader())
    return session


@cache
def _model_loader() -> Any:
    """Return one loader of botocore for all stores: its models are read once in a process.

    They lack what we do not use, with which botocore would spend a quarter of a request's CPU.
    """
    from botocore.loaders import create_loader

    loader = create_loader(os.environ.get("AWS_DATA_PATH"))
    shapes = loader.load_service_model("s3", "service-2")["shapes"]
    for shape, names in (("GetObjectOutput", _READ_OF_GET), ("PutObjectOutput", _READ_OF_PUT)):
        for name in shapes[shape]["members"].keys() - names:
            del shapes[shape]["members"][name]
    # botocore remembers the endpoint for equal parameters, but tries all rules for each new key.
    endpoints = loader.load_service_model("s3", "endpoint-rule-set-1")
    if "'Key'" not in repr(endpoints["rules"]):
        endpoints["parameters"].pop("Key", None)
    return loader


def _drop_expect(params: dict[str, Any], **_: Any) -> None:
    # A file body makes botocore add "Expect: 100-continue", and aiohttp then waits for an answer
    # that some servers and proxies never give. It would also cost a round trip for each write.
    params["headers"].pop("Expect", None)


def _follow_no_redirect(params: dict[str, Any], **_: Any) -> None:
    # By HEAD botocore asks for the region of a bucket that is elsewhere, and would ask again if
    # that were answered by another redirect, and so on.
    params["context"].setdefault("s3_redirect", {})["redirected"] = True


@cache
def _http_session() -> Any:
    """Return the class of HTTP sessions that clients are to have.

    aiohttp follows a redirect to any server, with session token and the customer's key: these
    follow none.
    """
    from aiobotocore.httpsession import AIOHTTPSession

    class Session(AIOHTTPSession):  # type: ignore[misc]
        async def _get_session(self, proxy_url: str | None) -> Any:
            session = await super()._get_session(proxy_url)
            return SimpleNamespace(request=partial(session.request, allow_redirects=False))

    return Session


async def _within(timeout_s: float, work: Awaitable[_T]) -> _T:
    """Await ``work``, which may ask a program, a metadata service or STS for credentials."""
    from botocore.exceptions import CredentialRetrievalError

    try:
        return await asyncio.wait_for(work, timeout_s)
    except asyncio.TimeoutError:
        raise CredentialRetrievalError(
            provider="credential_process, metadata service or STS",
            error_msg=f"no answer within {timeout_s:.3g} s",
        ) from None


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
        found = await _session(options).get_credentials()
        if found is not None:  # some are only fetched when they are used
            await found.get_frozen_credentials()
        return found

    try:
        found = _run_on_new_loop(lambda: _within(timeout_s, find()))
    except Exception as error:
        raise translate(error, op="credentials", store=options.url) from error
    return None if found is None else str(found.method)
