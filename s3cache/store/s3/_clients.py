"""The client of one store, made anew where its credentials are refused."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from s3cache.errors import ClosedError
from s3cache.store.s3._client import new_client
from s3cache.store.s3._options import S3Options

__all__ = ["Clients"]

# A client made for refused credentials is in use for so long before it is given up for another
# one, then twice as long: rights that are just too narrow are refused again and again.
_FIRST_WAIT_S = 5.0
_LONGEST_WAIT_S = 300.0


class Clients:
    """One client at a time, opened by the first who needs it.

    Its credentials are those that botocore found when it was made; which it renews by itself if
    they have a date. Others may be renewed by somebody: in a file, in the environment, by ``aws sso
    login``. So where they are refused the next call has a new client, which looks for them again.

    Attributes:
        calls: how many are under way; kept by whoever makes them.
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
