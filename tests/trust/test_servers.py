"""S3Store before servers, proxies and portals that answer what no S3 server would."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from s3cache.errors import PermanentError, S3CacheError, TransientError
from s3cache.store import S3Store
from tests.support.scripted import Reply, Request, ScriptedServer, raw_server
from tests.support.waiting import LONG_S

MIB = 1 << 20
REPOSITORY = Path(__file__).parents[2]
Open = Callable[..., S3Store]

# -- uploads


@pytest.mark.parametrize(
    "reply",
    [
        Reply(),
        Reply(200, {"content-type": "Text/HTML; charset=utf-8", "etag": '"page"'}, b"<html>"),
        Reply(200, {"etag": ""}),
        Reply(204),
    ],
)
async def test_an_upload_counts_only_if_the_server_says_so(
    server: ScriptedServer, open_scripted: Open, reply: Reply
) -> None:
    server.answer = lambda request: reply
    with pytest.raises(TransientError):
        await open_scripted().put("k", b"some bytes")


# -- redirects


@pytest.mark.parametrize("status", [301, 303, 307])
@pytest.mark.parametrize("verb", ["get", "put"])
async def test_nothing_is_sent_elsewhere(
    server: ScriptedServer, open_scripted: Open, status: int, verb: str
) -> None:
    """Neither the session token nor a signature, to anybody that a server names."""
    async with ScriptedServer() as elsewhere:
        location = {"location": f"{elsewhere.url}/bucket/p/k"}
        server.answer = lambda request: Reply(status, location)
        store = open_scripted(session_token="token")
        with pytest.raises(S3CacheError, match=r"elsewhere|region"):
            await call(store, verb)
        assert elsewhere.requests == []
        assert server.requests


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
async def endless(head: bytes) -> AsyncIterator[str]:
    """A server that answers ``head``, and then zeros as long as the client listens."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head)
        chunked = b"chunked" in head
        zeros = bytes(MIB)
        try:
            while True:
                writer.write(b"%x\r\n%b\r\n" % (MIB, zeros) if chunked else zeros)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()


_CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
_TOO_LONG = b"content-length: 99999999999\r\n\r\n"
_UNTIL_IT_CLOSES = b"connection: close\r\n\r\n"
_NO_RANGE = b'HTTP/1.1 200 OK\r\netag: "e"\r\n'
_RANGE = b'HTTP/1.1 206 Partial\r\netag: "e"\r\ncontent-range: bytes 0-9/10\r\n'
ENDLESS = {
    "until it closes": _NO_RANGE + _UNTIL_IT_CLOSES,
    "a range, chunked": _RANGE + _CHUNKED,
    "a range that is longer": _RANGE + _TOO_LONG,
    "an error, chunked": b"HTTP/1.1 500 x\r\n" + _CHUNKED,
    "an error until it closes": b"HTTP/1.1 403 x\r\n" + _UNTIL_IT_CLOSES,
}


def call(store: S3Store, verb: str) -> Coroutine[Any, Any, object]:
    async def listed() -> object:
        return [info async for info in store.list("k")]

    calls: dict[str, Callable[[], Coroutine[Any, Any, object]]] = {
        "get": lambda: store.get("k"),
        "head": lambda: store.head("k"),
        "put": lambda: store.put("k", b"x"),
        "put in parts": lambda: store.put("k", bytes(6 * MIB)),
        "delete": lambda: store.delete("k"),
        "list": listed,
    }
    return calls[verb]()


@pytest.mark.parametrize("verb", ["get", "put", "list", "delete"])
@pytest.mark.parametrize("head", ENDLESS)
async def test_an_answer_without_end_is_read_up_to_a_bound(
    verb: str, head: str, open_scripted: Open
) -> None:
    async with endless(ENDLESS[head]) as url:
        store = open_scripted(
            endpoint_url=url,
            max_object_bytes=8 * MIB,
            part_bytes=4 * MIB,
            conditional_create="native",
        )
        with pytest.raises((PermanentError, TransientError)):
            await asyncio.wait_for(call(store, verb), LONG_S)


# -- answers that are none of S3's

STRANGE = {
    "a page": b'200 OK\r\netag: "e"\r\nconnection: close\r\n\r\n<html>',
    "switching protocols": b'101 Switch\r\netag: "e"\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n',
    "no content": b'204 No Content\r\netag: "e"\r\n\r\n',
    "a part": b'206 Partial\r\netag: "e"\r\ncontent-length: 0\r\n\r\n',
    "a time that is none": b"200 OK\r\nlast-modified: soon\r\ncontent-length: 0\r\n\r\n",
    "nothing at all": b"200 OK\r\ncontent-length: 0\r\n\r\n",
}


@pytest.mark.parametrize("verb", ["put", "put in parts", "head", "list"])
@pytest.mark.parametrize("strange", STRANGE)
async def test_a_strange_answer_is_no_success_and_may_pass(
    verb: str, strange: str, open_scripted: Open
) -> None:
    """Nothing was stored, and nobody knows what is there; that is no mistake of ours."""

    async def serve(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 " + STRANGE[strange])
        await writer.drain()
        await asyncio.sleep(0.02)

    async with raw_server(serve) as url:
        store = open_scripted(
            endpoint_url=url, conditional_create="native", multipart_bytes=5 * MIB
        )
        with pytest.raises(TransientError):
            await asyncio.wait_for(call(store, verb), LONG_S)


# -- listings


def page(*keys: str, more: str = "") -> Reply:
    objects = "".join(
        f"<Contents><Key>{key}</Key><Size>1</Size>"
        "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
        for key in keys
    )
    token = f"<NextContinuationToken>{more}</NextContinuationToken>" if more else ""
    text = (
        f"<ListBucketResult>{token}<IsTruncated>{'true' if more else 'false'}</IsTruncated>"
        f"{objects}</ListBucketResult>"
    )
    return Reply(200, {"content-type": "application/xml"}, text.encode())


async def test_what_was_not_asked_for_is_not_listed(
    server: ScriptedServer, open_scripted: Open
) -> None:
    """As from a server, or by way of a proxy, to which a request's query is lost."""
    server.answer = lambda request: page("p/k.1", "p/other.1", "p2/k.1", "k.1", "p/k")
    assert [info.key async for info in open_scripted().list("k.")] == ["k.1"]


async def test_a_listing_that_goes_in_circles_ends(
    server: ScriptedServer, open_scripted: Open
) -> None:
    server.answer = lambda request: page("p/k.1", more="again")
    with pytest.raises(TransientError, match="goes on"):
        await asyncio.wait_for(call(open_scripted(), "list"), LONG_S)
    assert len(server.requests) == 2


# -- who helps with credentials


ASKING = """
import asyncio, sys
from s3cache.errors import S3CacheError
from s3cache.store import S3Options, S3Store

async def main():
    store = S3Store(S3Options("bucket", endpoint_url=sys.argv[1], region="us-east-1"))
    try:
        await store.get("k")
    except S3CacheError:
        print("refused")
    finally:
        await store.aclose()

asyncio.run(main())
"""


@pytest.mark.parametrize("status", [302, 307, 308])
async def test_a_token_for_credentials_is_sent_nowhere_else(
    server: ScriptedServer, tmp_path: Path, status: int
) -> None:
    """A web identity's token is as good as a password, and STS wants it in the body."""
    (tmp_path / "token").write_text("web-identity-token")
    environment = {
        **os.environ,
        "AWS_WEB_IDENTITY_TOKEN_FILE": str(tmp_path / "token"),
        "AWS_ROLE_ARN": "arn:aws:iam::123456789012:role/r",
        "AWS_ENDPOINT_URL_STS": server.url,
        "AWS_MAX_ATTEMPTS": "1",
    }
    async with ScriptedServer() as elsewhere:
        server.answer = lambda request: Reply(status, {"location": f"{elsewhere.url}/sts"})
        # In a process of its own: botocore reads its description of STS on the event loop.
        asking = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", ASKING, server.url),
            env=environment,
            cwd=REPOSITORY,
            stdout=asyncio.subprocess.PIPE,
        )
        said, _ = await asyncio.wait_for(asking.communicate(), 50)
        assert said == b"refused\n"
        assert b"web-identity-token" in server.requests[0].body
        assert elsewhere.requests == []
