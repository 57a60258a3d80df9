"""The one place that knows aioboto3: how a client is made, replaced, and handed a body."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import time
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any

from s3cache._forks import new_event_loop, threads_are_greenlets
from s3cache._version import __version__
from s3cache.errors import ClosedError
from s3cache.store.s3._credentials import bounded_session
from s3cache.store.s3._errors import no_answer_of_s3
from s3cache.store.s3._http import http_session, region_judge
from s3cache.store.s3._options import S3Options
from s3cache.store.s3._place import endpoint_in_use

__all__ = ["CHUNK_BYTES", "Clients", "S3Body", "new_client"]

CHUNK_BYTES = 256 * 2**10

# A client made for refused credentials is in use for so long before it is given up for another
# one, then twice as long: rights that are just too narrow are refused again and again.
_FIRST_WAIT_S = 5.0
_LONGEST_WAIT_S = 300.0


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


async def new_client(options: S3Options) -> Any:
    """An open aioboto3 client; ``await client.close()`` ends it.

    It is made on another thread with an event loop of its own: importing botocore and reading its
    models takes 0.7 s, during which the caller's loop goes on. Nothing in a client is bound to a
    loop before its first request, which opens the connection pool.
    """
    if threads_are_greenlets():  # which share one thread, where no second loop can run
        return await _entered(options)
    return await asyncio.to_thread(_make_client, options)


def _make_client(options: S3Options) -> Any:
    # All of it on the loop, imports too: a forked child must not inherit half a module.
    loop = new_event_loop()
    try:
        return loop.run_until_complete(_entered(options))
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


@cache
def _model_loader() -> Any:
    """Return one loader of botocore for all stores, so that its models are read once a process."""
    from botocore.loaders import create_loader

    return create_loader(os.environ.get("AWS_DATA_PATH"))


def _straight_config(kind: Any) -> Any:
    """What every client of a session is made with, those that get credentials too."""

    class Config(kind):  # type: ignore[misc]
        def merge(self, other_config: Any) -> Any:
            merged = super().merge(other_config)
            merged.http_session_cls = self.http_session_cls  # which the original leaves out
            return merged

    return Config(http_session_cls=http_session())


async def _entered(options: S3Options) -> Any:
    import aioboto3
    import aioboto3.s3.inject  # what the first client would import
    from aiobotocore.config import AioConfig
    from botocore import UNSIGNED

    await asyncio.sleep(0)  # a fork need not wait for the rest too
    s3: dict[str, Any] = {"payload_signing_enabled": True}
    if options.addressing_style != "auto":  # else what ~/.aws/config says
        s3["addressing_style"] = options.addressing_style
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
        # In full, for botocore would put its own together for each request, of many parts.
        user_agent=f"s3cache/{__version__} aioboto3/{aioboto3.__version__} {_runtime()}",
        parameter_validation=False,  # ours are right
    )
    botocore_session = bounded_session(options.read_timeout_s)
    botocore_session.set_default_client_config(_straight_config(AioConfig))
    botocore_session.register_component("data_loader", _model_loader())
    parsers = botocore_session.get_component("response_parser_factory")
    parsers.set_parser_defaults(timestamp_parser=parse_time)
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
    session.events.register_last("before-call.s3.HeadBucket", _take_as_it_is)
    is_aws = endpoint_in_use(options.endpoint_url, options.profile) is None
    session.events.register_first("needs-retry.s3", region_judge(is_aws=is_aws))

    client = session.client(
        "s3",
        region_name=options.region,
        endpoint_url=options.endpoint_url,
        verify=options.ca_bundle,
        config=config,
    )
    return await client.__aenter__()


def parse_time(value: Any) -> datetime:
    """The times that S3 sends, and whatever else botocore knows how to read, ten times slower.

    Raises:
        TransientError: it is no time.
    """
    from botocore.utils import parse_timestamp

    if isinstance(value, str):
        with contextlib.suppress(ValueError, TypeError):
            return parsedate_to_datetime(value)
    try:
        parsed: datetime = parse_timestamp(value)
    except ValueError:
        raise no_answer_of_s3(f"has a time that cannot be read ({value!r:.40})") from None
    return parsed


def _runtime() -> str:
    return f"python/{platform.python_version()} {platform.system().lower()}"


def _drop_expect(params: dict[str, Any], **_: Any) -> None:
    params["headers"].pop("Expect", None)


def _take_as_it_is(params: dict[str, Any], **_: Any) -> None:
    # By this botocore asks for the region of a bucket that is elsewhere, and asks again if that is
    # answered by another redirect, and so on.
    params["context"].setdefault("s3_redirect", {})["redirected"] = True


class Clients:
    """One client at a time, opened by the first who needs it.

    A client has the credentials that botocore found when it was made, and botocore renews those
    with a date. Others may be renewed from outside: in a file, in the environment, by ``aws sso
    login``. So once they are refused, the next call has a new client, which looks for them again.

    Attributes:
        calls: how many are under way; the callers keep the count.
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
        self.calls = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opening = asyncio.Lock()
        self._closed = False
        self._refused = False
        self._made_at = 0.0
        self._wait_s = 0.0
        # Those that were given to us do not change.
        self._is_renewable = options.access_key is None and not options.anonymous

    async def get(self) -> Any:
        """The client.

        Raises:
            ClosedError: the store is closed, or in use on another event loop.
        """
        url, loop = self._url, asyncio.get_running_loop()
        if self._client is not None and loop is not self._loop:
            raise ClosedError(f"{url} is in use on another event loop; open one for each")
        if self._client is not None and not self._refused:
            return self._client
        async with self._opening:
            if self._closed:
                raise ClosedError(f"{url} is closed")
            if self._client is None or self._refused:
                client = await self._make(self._options)
                if self._client is not None:
                    self._former.append(self._client)
                self._client, self._loop = client, loop
                self._refused, self._made_at = False, self._clock()
            return self._client

    def refuse(self) -> None:
        """The server does not accept the client's credentials, or botocore has found none."""
        if self._client is None or not self._is_renewable:
            return
        used_s = self._clock() - self._made_at
        if used_s > 2 * _LONGEST_WAIT_S:  # it was good for a long time
            self._wait_s = 0.0
        if used_s >= self._wait_s and not self._refused:
            self._wait_s = min(max(2 * self._wait_s, _FIRST_WAIT_S), _LONGEST_WAIT_S)
            self._refused = True

    @property
    def former_are_idle(self) -> bool:
        """There are clients that were replaced, and no call that may use one."""
        return bool(self._former) and not self.calls

    async def close_former(self) -> None:
        """Close clients that were replaced; no call may be under way."""
        former, self._former = self._former, []
        for client in former:
            await client.close()

    async def aclose(self) -> None:
        """Close all; calls under way fail."""
        self._closed = True
        async with self._opening:
            client, self._client = self._client, None
            if client is not None:
                self._former.append(client)
            await self.close_former()
