"""S3Store with servers, proxies and portals that answer as no S3 server would."""

from __future__ import annotations

import asyncio

import pytest

from s3cache.errors import PermanentError, TransientError
from tests.support.scripted import Reply, ScriptedServer, raw_server
from tests.support.waiting import LONG_S

MIB = 1 << 20

# -- bodies


_CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
_TOO_LONG = b"content-length: 99999999999\r\n\r\n"
_UNTIL_IT_CLOSES = b"connection: close\r\n\r\n"
_NO_RANGE = b'HTTP/1.1 200 OK\r\netag: "e"\r\n'
_RANGE = b'HTTP/1.1 206 Partial\r\netag: "e"\r\ncontent-range: bytes 0-9/10\r\n'
ENDLESS = {
    "until it closes": _NO_RANGE + _UNTIL_IT_CLOSES,
    "a range, chunked": _RANGE + _CHUNKED,
    "a range that is longer": _RANGE + _TOO_LONG,
    "a length that is too large": _NO_RANGE + _TOO_LONG,
}


@pytest.mark.parametrize("head", ENDLESS.values(), ids=ENDLESS)
async def test_an_endless_body_is_read_up_to_a_bound(head: bytes, server: ScriptedServer) -> None:
    """The server answers ``head``, and then sends zeros while the client reads."""

    async def serve(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        zeros = b"%x\r\n%b\r\n" % (MIB, bytes(MIB)) if b"chunked" in head else bytes(MIB)
        while True:
            writer.write(zeros)
            await writer.drain()

    async with raw_server(serve) as url:
        store = server.open(endpoint_url=url, max_object_bytes=8 * MIB, part_bytes=4 * MIB)
        with pytest.raises((PermanentError, TransientError)):
            await asyncio.wait_for(store.get("k"), LONG_S)


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


async def test_keys_that_were_not_requested_are_not_listed(server: ScriptedServer) -> None:
    """A server or a proxy may lose the query of a request."""
    server.answer = lambda request: page("p/k.1", "p/other.1", "p2/k.1", "k.1", "p/k")
    assert [info.key async for info in server.open().list("k.")] == ["k.1"]


async def test_a_listing_that_goes_in_circles_ends(server: ScriptedServer) -> None:
    server.answer = lambda request: page("p/k.1", more="again")
    with pytest.raises(TransientError, match="circles"):
        [info async for info in server.open().list("k")]
    assert len(server.requests) == 2
