"""An S3 server in this process with answers from the test, and stores on it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from s3cache.store import S3Options, S3Store
from tests.support.processes import KEYS


@dataclass
class Request:
    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    sent: dict[str, str]  #: the headers in the case in which they were sent


@dataclass
class Reply:
    """A reply. If ``body`` is shorter than ``length``, the connection is closed after it."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    length: int | None = None
    delay_s: float = 0.0


def error_reply(status: int, code: str, message: str = "", **headers: str) -> Reply:
    text = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    return Reply(status, {"content-type": "application/xml", **headers}, text.encode())


class ScriptedServer:
    """A server that keeps each request and passes it to ``answer``, which the test sets."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self.requests: list[Request] = []
        self.answer: Callable[[Request], Reply] = lambda request: Reply()
        self.url = ""
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> ScriptedServer:
        self.url = await self._stack.enter_async_context(_listening(self._serve, self._tls))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def open(self, **options: Any) -> S3Store:
        """Return a store on this server; it is closed with the server."""
        where = {"endpoint_url": self.url, **KEYS, **options}
        store = S3Store(S3Options("bucket", "p", **where))
        self._stack.push_async_callback(store.aclose)
        return store

    def made(self, method: str, part: str = "") -> list[Request]:
        return [r for r in self.requests if r.method == method and part in r.target]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await self._one(reader, writer):
            pass

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, target, _ = head[0].split(" ")
        sent = dict(line.split(": ", 1) for line in head[1:] if line)
        headers = {name.lower(): value.lower() for name, value in sent.items()}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        request = Request(method, target, headers, body, sent)
        self.requests.append(request)
        reply = self.answer(request)
        await asyncio.sleep(reply.delay_s)
        length = len(reply.body) if reply.length is None else reply.length
        lines = [f"HTTP/1.1 {reply.status} Scripted", f"content-length: {length}"]
        lines += [f"{name}: {value}" for name, value in reply.headers.items()]
        writer.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
        if method != "HEAD":
            writer.write(reply.body)
        await writer.drain()
        return method == "HEAD" or len(reply.body) == length


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with ScriptedServer() as server:
        yield server


@pytest.fixture
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("http_proxy", "https_proxy", "no_proxy"):
        monkeypatch.delenv(variable, raising=False)
        monkeypatch.delenv(variable.upper(), raising=False)


@asynccontextmanager
async def raw_server(serve: Callable[[bytes, asyncio.StreamWriter], Any]) -> AsyncIterator[str]:
    """Yield the URL of a server that passes the head of a request to ``serve``."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await serve(await reader.readuntil(b"\r\n\r\n"), writer)

    async with _listening(answer) as url:
        yield url


@asynccontextmanager
async def _listening(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[str]:
    """Yield the URL of a server that passes connections to ``serve``, and cancels it at the end."""
    serving: set[asyncio.Task[Any]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        try:
            await serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            serving.discard(task)
            writer.close()

    listening = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=tls)
    try:
        yield f"http{'s' if tls else ''}://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
