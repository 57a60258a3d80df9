"""S3Store before servers, proxies and portals that answer what no S3 server would."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from s3cache.errors import PermanentError, S3CacheError, TransientError
from s3cache.store import S3Store
from tests.integration.conftest import Reply, Request, ScriptedServer

MIB = 1 << 20
Open = Callable[..., S3Store]

# -- uploads


@pytest.mark.parametrize(
    "reply",
    [
        Reply(),
        Reply(200, {"content-type": "text/html"}, b"<html>Please log in</html>"),
        Reply(200, {"content-type": "text/html", "etag": '"page"'}, b"<html>Log in</html>"),
        Reply(200, {"content-type": "Text/HTML; charset=utf-8", "etag": '"page"'}, b"<html>"),
        Reply(200, {"etag": ""}),
        Reply(204),
        Reply(202, {"content-type": "application/json"}, b"{}"),
    ],
)
async def test_an_upload_counts_only_if_the_server_says_so(
    server: ScriptedServer, open_scripted: Open, reply: Reply
) -> None:
    server.answer = lambda request: reply
    with pytest.raises(TransientError):
        await open_scripted().put("k", b"some bytes")


# -- redirects


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("verb", ["get", "head", "put", "delete"])
async def test_nothing_is_sent_elsewhere(
    server: ScriptedServer, open_scripted: Open, status: int, verb: str
) -> None:
    """Neither the session token nor a signature, to anybody that a server names."""
    elsewhere = ScriptedServer()
    await elsewhere.start()
    try:
        location = {"location": f"{elsewhere.url}/bucket/p/k"}
        server.answer = lambda request: Reply(status, location)
        store = open_scripted(session_token="token")
        calls = {
            "get": lambda: store.get("k"),
            "head": lambda: store.head("k"),
            "put": lambda: store.put("k", b"x"),
            "delete": lambda: store.delete("k"),
        }
        with pytest.raises(S3CacheError, match=r"elsewhere|region"):
            await calls[verb]()
        assert elsewhere.requests == []
        assert server.requests
    finally:
        await elsewhere.stop()


async def test_a_redirect_to_another_region_stays_at_the_endpoint(
    server: ScriptedServer, open_scripted: Open
) -> None:
    def answer(request: Request) -> Reply:
        if "eu-central-1" in request.headers["authorization"]:
            return Reply(206, {"content-range": "bytes 0-2/3", "etag": '"e"'}, b"abc")
        location = {"x-amz-bucket-region": "eu-central-1", "location": "http://192.0.2.1/"}
        return Reply(301, location)

    server.answer = answer
    assert await open_scripted().get("k") == b"abc"
    assert len(server.requests) == 2


# -- bodies


@asynccontextmanager
async def endless(head: bytes) -> AsyncIterator[tuple[str, list[int]]]:
    """A server that answers ``head``, and then zeros for as long as somebody listens."""
    sent = [0]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head)
        chunked = b"chunked" in head
        zeros = bytes(MIB)
        try:
            while True:
                writer.write(b"%x\r\n%b\r\n" % (MIB, zeros) if chunked else zeros)
                await writer.drain()
                sent[0] += MIB
        except ConnectionError:
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", sent
    finally:
        listening.close()


_NO_RANGE = b'HTTP/1.1 200 OK\r\netag: "e"\r\n'
_RANGE = b'HTTP/1.1 206 Partial\r\netag: "e"\r\ncontent-range: bytes 0-9/10\r\n'
HEADS = {
    "chunked": _NO_RANGE + b"transfer-encoding: chunked\r\n\r\n",
    "until it closes": _NO_RANGE + b"connection: close\r\n\r\n",
    "a range, chunked": _RANGE + b"transfer-encoding: chunked\r\n\r\n",
    "a range that is longer": _RANGE + b"content-length: 99999999999\r\n\r\n",
    "a length that is too large": _NO_RANGE + b"content-length: 99999999999\r\n\r\n",
}


@pytest.mark.parametrize("head", HEADS)
async def test_a_body_is_bounded_whatever_its_headers_say(head: str, open_scripted: Open) -> None:
    async with endless(HEADS[head]) as (url, sent):
        store = open_scripted(endpoint_url=url, max_object_bytes=8 * MIB, part_bytes=4 * MIB)
        await store.connect()
        tracemalloc.start()
        try:
            with pytest.raises((PermanentError, TransientError)):
                await asyncio.wait_for(store.get("k"), 20)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 40 * MIB
        assert sent[0] < 64 * MIB  # what lies in buffers on the way


async def test_a_range_of_an_endless_body_is_read_and_no_more(open_scripted: Open) -> None:
    async with endless(HEADS["chunked"]) as (url, _):
        store = open_scripted(endpoint_url=url)
        assert await asyncio.wait_for(store.get_range("k", 5, 10), 20) == bytes(10)
