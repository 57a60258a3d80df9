"""A TCP proxy on loopback that makes a link as bad as a test asks for.

::

    with Proxy(server_port) as proxy:
        proxy.link = Link(bytes_per_s=50_000)      # from now on, for old connections too
        proxy.link = Link(reset_down=1_000, times=2)
        proxy.refuse()                             # nothing listens
        proxy.heal()
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
import threading
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

_CHUNK_BYTES = 16 << 10
_REQUEST = re.compile(rb"(GET|PUT|HEAD|POST|DELETE) (\S{1,2000}) HTTP/1\.1\r\n")
_LONGEST_REQUEST_LINE = 2048


@dataclass(frozen=True, eq=False)
class Link:
    """How a link passes bytes. Up is towards the server, down is towards the client.

    Attributes:
        flows: if false, connections are accepted, and bytes are held back until it is true.
        delay_s: the delay of each chunk on the way down.
        bytes_per_s: the limit of each direction, for all connections together.
        reset_up, reset_down: a connection is reset after this many bytes over this link.
        cut_down: the same, but closed in good order, as by a proxy if its server has died.
        times: how many connections are reset or closed.
    """

    flows: bool = True
    delay_s: float = 0.0
    bytes_per_s: float | None = None
    reset_up: int | None = None
    reset_down: int | None = None
    cut_down: int | None = None
    times: int = 1 << 30


class Proxy:
    """A proxy on its own thread. Attributes and methods are for the test's thread.

    Attributes:
        requests: (method, target) of each HTTP request of a client, in order.
        broken: connections reset or cut since the start.
    """

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._link = Link()
        self._left = 0  # connections still to break
        self._free_at = {"up": 0.0, "down": 0.0}  # when a throttled direction is idle again
        self.requests: list[tuple[str, str]] = []
        self.broken = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        self._socket = _bound(0)
        self.port: int = self._socket.getsockname()[1]
        self._listens = False
        self._call(self._listen())
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._refuse())
        self._socket.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def link(self) -> Link:
        return self._link

    @link.setter
    def link(self, link: Link) -> None:
        self._call(self._set(link))

    def refuse(self) -> None:
        """Reset every connection and accept no new one."""
        self._call(self._refuse())

    def heal(self) -> None:
        """Become a good link again, also for the present connections."""
        self._call(self._listen())
        self.link = Link()

    def made(self, method: str, part: str = "") -> list[str]:
        """Return the targets of requests so far that contain ``part``."""
        return [target for verb, target in self.requests if verb == method and part in target]

    # -- on the loop

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _set(self, link: Link) -> None:
        async with self._changed:
            self._link, self._left = link, link.times
            self._free_at = {"up": 0.0, "down": 0.0}
            self._changed.notify_all()

    async def _listen(self) -> None:
        if not self._listens:
            self._listens = True
            self._socket.setblocking(False)
            self._socket.listen(100)
            # Not asyncio's server: if it is closed while a client connects, it leaks that socket.
            self._loop.add_reader(self._socket, self._accept)

    async def _refuse(self) -> None:
        if self._listens:
            self._listens = False
            self._loop.remove_reader(self._socket)
            self._socket.close()
            self._socket = _bound(self.port)  # keeps the port from other processes
        for task in (tasks := [*self._tasks]):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the client is gone
            client, _ = self._socket.accept()
            client.setblocking(False)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # routers forward at once
            task = asyncio.ensure_future(self._serve(client))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(lambda _: client.close())  # if the task never started

    async def _serve(self, client: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=client)
        try:
            upstream = await asyncio.open_connection("127.0.0.1", self._server_port)
        except BaseException as exc:
            await _closed([], writer, reset=True)
            if isinstance(exc, OSError):
                return
            raise
        pumps = [
            asyncio.ensure_future(self._pump("up", reader, upstream[1])),
            asyncio.ensure_future(self._pump("down", upstream[0], writer)),
        ]
        broken = True
        try:
            done, _ = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            broken = any(pump.exception() for pump in done)
        finally:
            await _closed(pumps, writer, upstream[1], reset=broken)

    async def _pump(
        self, way: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Return at the stream's end; raise ``ConnectionError`` if the connection must be reset."""
        link, passed, tail = self._link, 0, b""
        while chunk := await reader.read(_CHUNK_BYTES):
            if way == "up":
                tail = self._note(tail, chunk)
            async with self._changed:
                await self._changed.wait_for(lambda: self._link.flows)
            if self._link is not link:
                link, passed = self._link, 0
            if way == "down" and link.delay_s:
                await self._wait(link, time.monotonic() + link.delay_s)
            reset_at = link.reset_up if way == "up" else link.reset_down
            cut_at = link.cut_down if way == "down" else None
            limit = min((at for at in (reset_at, cut_at) if at is not None), default=None)
            breaks = limit is not None and passed + len(chunk) >= limit and self._left > 0
            if breaks:
                assert limit is not None
                chunk = chunk[: limit - passed]
            await self._take_time(way, link, len(chunk))
            writer.write(chunk)
            await writer.drain()
            passed += len(chunk)
            if breaks:
                self._left -= 1
                self.broken += 1
                if limit == cut_at:
                    return
                raise ConnectionResetError

    async def _take_time(self, way: str, link: Link, size: int) -> None:
        if link.bytes_per_s is not None:
            free_at = max(self._free_at[way], time.monotonic()) + size / link.bytes_per_s
            self._free_at[way] = free_at
            await self._wait(link, free_at)

    async def _wait(self, link: Link, end: float) -> None:
        """Wait until ``end`` or until the link changes: a faster link is faster at once."""
        while self._link is link and (left_s := end - time.monotonic()) > 0:
            await asyncio.sleep(min(left_s, 0.02))

    def _note(self, tail: bytes, chunk: bytes) -> bytes:
        text, end = tail + chunk, 0
        for found in _REQUEST.finditer(text):
            self.requests.append((found[1].decode(), found[2].decode("latin-1")))
            end = found.end()
        return text[end:][-_LONGEST_REQUEST_LINE:]


def _bound(port: int) -> socket.socket:
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("127.0.0.1", port))
    return bound


async def _closed(
    pumps: Sequence[asyncio.Future[None]], *writers: asyncio.StreamWriter, reset: bool
) -> None:
    """Close everything before waiting for any of it, then wait until it is closed."""
    for pump in pumps:
        pump.cancel()
    for writer in writers:
        if reset:  # closing with RST discards unsent bytes
            with contextlib.suppress(OSError):
                writer.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                )
            writer.transport.abort()
        else:
            writer.close()
    waits = (writer.wait_closed() for writer in writers)
    await asyncio.gather(*pumps, *waits, return_exceptions=True)
