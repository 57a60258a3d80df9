"""The one place that knows aioboto3: how a client is made, and replaced."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import re
import time
from collections.abc import AsyncIterator, Callable
from functools import cache
from typing import Any

from s3cache.errors import ClosedError
from s3cache.store.s3._options import S3Options, partition_region
from s3cache.store.s3._session import new_session, run_on_new_loop
from s3cache.util import __version__
from s3cache.util.forks import threads_are_greenlets

__all__ = ["CHUNK_BYTES", "Clients", "S3Body", "new_client"]

CHUNK_BYTES = 256 << 10
# Where rights are just too narrow, a new client is refused again: so few are made.
_RENEW_EVERY_S = 120.0


class S3Body:
    """Bytes as a file for botocore (hashing) and as an async iterable for aiohttp (sending).

    Plain bytes go through ``io.BytesIO``, which copies every 64 KiB, and from 1 MiB on aiohttp
    warns; a memoryview botocore refuses.
    """

    __slots__ = ("_at", "_view")

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    def __len__(self) -> int:
        return len(self._view)

    def read(self, size: int = -1) -> memoryview:
        end = len(self._view) if size < 0 else self._at + size
        chunk = self._view[self._at : end]
        self._at += len(chunk)
        return chunk

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, len(self._view))[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    async def __aiter__(self) -> AsyncIterator[memoryview]:
        for start in range(0, len(self._view), CHUNK_BYTES):
            yield self._view[start : start + CHUNK_BYTES]


# -- making a client


async def new_client(options: S3Options) -> Any:
    """Return an open aioboto3 client; ``await client.close()`` ends it.

    It is made on another thread with an event loop of its own: importing botocore and reading its
    models takes 0.7 s, during which the caller's loop goes on. Nothing in a client is bound to a
    loop before its first request, which opens the connection pool.
    """
    if threads_are_greenlets():  # which share one thread, where no second loop can run
        return await _open_client(options)
    return await asyncio.to_thread(_make_client, options)


def _make_client(options: S3Options) -> Any:
    # All of it on the loop, imports too: a forked child must not inherit half a module.
    return run_on_new_loop(lambda: _open_client(options))


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
    botocore_session = new_session(options.read_timeout_s)
    botocore_session.register_component("data_loader", _model_loader())
    session = aioboto3.Session(
        botocore_session=botocore_session,
        profile_name=options.profile,
        aws_access_key_id=options.access_key,
        aws_secret_access_key=options.secret_key,
        aws_session_token=options.session_token,
    )
    # A file body makes botocore add "Expect: 100-continue", and aiohttp then waits for an answer
    # that some servers and proxies never give. It would also cost a round trip for each write.
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
    params["headers"].pop("Expect", None)


def _redirect_no_more(params: dict[str, Any], **_: Any) -> None:
    # By HEAD botocore asks for the region of a bucket that is elsewhere, and would ask again if
    # that were answered by another redirect, and so on.
    params["context"].setdefault("s3_redirect", {})["redirected"] = True


def _stay_in_partition(request_dict: Any, response: Any, operation: Any, **_: Any) -> None:
    """Keep botocore from following S3 to a region of another partition, or to what is no region.

    Where a bucket is elsewhere, S3 names its region in a header or in its error, and botocore asks
    there, signed again. Another partition is another operator (AWS China is), who would get the
    session token and the customer's key.
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


# -- replacing a client


class Clients:
    """One client at a time, opened by the first call that needs it.

    A client has the credentials that botocore found when it was made, and botocore renews those
    with a date. Others may be renewed from outside: in a file, in the environment, by ``aws sso
    login``. So once they are refused, the next call gets a new client, which looks for them again.
    """

    def __init__(
        self,
        options: S3Options,
        *,
        make: Callable[[S3Options], Any] = new_client,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._url = options.url  # which may read files
        self._make = make
        self._clock = clock
        self._client: Any = None
        self._former: list[Any] = []  # still in use by calls that began with them
        self._calls = 0
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
            raise ClosedError(f"{self._url} is in use on another event loop; open one for each")
        if self._client is not None and not self._refused:
            return self._client
        async with self._opening:
            if self._closed:
                raise ClosedError(f"{self._url} is closed")
            if self._client is None or self._refused:
                client = await self._make(self._options)
                if self._client is not None:
                    self._former.append(self._client)
                self._client, self._loop, self._refused = client, loop, False
            return self._client

    @contextlib.asynccontextmanager
    async def use(self) -> AsyncIterator[None]:
        """Keep clients that are replaced open until the block, which may use one, has ended."""
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                await self._close_former()

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
            client, self._client = self._client, None
            if client is not None:
                self._former.append(client)
            await self._close_former()

    async def _close_former(self) -> None:
        former, self._former = self._former, []
        for client in former:
            await client.close()
