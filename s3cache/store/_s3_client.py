"""Clients of aioboto3: make, use and replace them. No other module depends on aioboto3."""

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
# If permissions are too narrow, a new client is refused too, so make few of them.
_RENEW_EVERY_S = 120.0
# For opening a client, which may load credentials on a thread that the exit waits for.
_OPEN_TIMEOUT_S = 30.0
# The fields that S3Store reads from answers to the most frequent requests.
_READ_OF_GET, _READ_OF_PUT = {"Body", "ContentLength", "ContentRange", "ETag"}, {"ETag"}


class Clients:
    """One client at a time, opened by the first call that needs it.

    botocore renews credentials with an expiry date. Others may be renewed externally: in a file, in
    the environment, by ``aws sso login``. So after a refusal the next call gets a new client, which
    loads credentials again. Running calls with the old client fail, and may be tried again.
    """

    def __init__(self, options: S3Options) -> None:
        self._options = options
        self._client: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening = asyncio.Lock()
        self._closed = False
        self._refused = False
        self._renew_from = float("-inf")
        # Credentials from options do not change.
        self._is_renewable = options.access_key is None and not options.anonymous

    async def get(self) -> Any:
        """Return the client.

        Raises:
            ClosedError: the store is closed, or in use on another event loop.
        """
        loop = asyncio.get_running_loop()
        if self._client is not None and loop is not self._loop:
            raise ClosedError("the store is in use on another event loop; open a store for each")
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
        """Note that the server refused the credentials, or that botocore found none."""
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

    It is made on another thread with its own event loop: importing botocore and reading its models
    takes 0.7 s, while the caller's loop goes on. A client is not bound to a loop before its first
    request, which opens the connection pool.
    """
    if threads_are_greenlets():  # they share one thread, so no second loop can run
        return await _open_client(options)
    # Import on the loop too: a forked child must not inherit a partly imported module.
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
    """Return botocore's loader for all stores, so that a process reads its models once.

    We remove unused parts of the models, with which botocore would spend a quarter of a request's
    CPU time.
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
    # For a file body botocore adds "Expect: 100-continue", and aiohttp then waits for an answer
    # that some servers and proxies never send. It would also cost a round trip for each write.
    params["headers"].pop("Expect", None)


def _follow_no_redirect(params: dict[str, Any], **_: Any) -> None:
    # After a redirect botocore sends HEAD to find the bucket's region. It would repeat this without
    # end if the answer were another redirect.
    params["context"].setdefault("s3_redirect", {})["redirected"] = True


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


async def _within(timeout_s: float, work: Awaitable[_T]) -> _T:
    """Await ``work``, which may get credentials from a program, a metadata service or STS."""
    from botocore.exceptions import CredentialRetrievalError

    try:
        return await asyncio.wait_for(work, timeout_s)
    except asyncio.TimeoutError:
        raise CredentialRetrievalError(
            provider="credential_process, metadata service or STS",
            error_msg=f"no answer within {timeout_s:.3g} s",
        ) from None


def credentials_source(options: S3Options, timeout_s: float) -> str | None:
    """Return the source of a client's credentials, or None if there are none.

    Call it on a separate thread: it imports botocore, and runs an event loop.

    Raises:
        AccessDeniedError: the credentials cannot be loaded within ``timeout_s``.
        PermanentError: botocore cannot use its configuration.
    """
    if options.anonymous:
        return "nowhere: requests are anonymous"
    if options.access_key is not None:
        return "the options access_key and secret_key"

    async def find() -> Any:
        found = await _session(options).get_credentials()
        if found is not None:  # some are only loaded at their first use
            await found.get_frozen_credentials()
        return found

    try:
        found = _run_on_new_loop(lambda: _within(timeout_s, find()))
    except Exception as error:
        raise translate(error, op="credentials", store=options.url) from error
    return None if found is None else str(found.method)
