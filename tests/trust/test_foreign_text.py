"""Answers of servers that no S3 server would give do no harm, nor does the text of entries."""

from __future__ import annotations

import asyncio
import io
import logging
from pathlib import Path
from typing import Any, get_args

import pytest

from s3cache import errors
from s3cache.cache import Cache, Miss
from s3cache.cli import main
from s3cache.errors import PermanentError, TransientError
from s3cache.util.logs import Topic, logger_of
from s3cache.util.text import escape
from tests.support.caching import KEY
from tests.support.processes import KEYS
from tests.support.scripted import Reply, ScriptedServer, error_reply, raw_server
from tests.support.shelves import Shelf
from tests.support.waiting import LONG_S

# Each kind: ESC, C1 (0x9b begins a sequence too), direction, line separators, BEL, form feed.
CONTROLS = "\x1b]0;owned\x07\x9b2J\u202e\u2066\u2028\x85\r\n\x0c\x00\x7f"
FORGED = f"good{CONTROLS}forged line"


def test_every_error_is_one_line_that_can_be_printed() -> None:
    where = {"op": "get", "store": FORGED, "key": FORGED, "attempts": 2}
    for name in errors.__all__:
        kind: Any = getattr(errors, name)
        if issubclass(kind, errors.StoreError):
            error = kind(FORGED, **where)
        else:
            arguments = {"ConfigError": 3, "CorruptError": 2, "UntrustedError": 2}.get(name, 1)
            is_cut = issubclass(kind, errors.TruncatedError)
            error = kind(FORGED, 1, 2) if is_cut else kind(*[FORGED] * arguments)
        assert str(error).isprintable()
        assert "forged line" in str(error)


@pytest.mark.parametrize("topic", [None, "ranks", "recall", *get_args(Topic)])
def test_no_log_record_has_control_characters(topic: Any) -> None:
    """This includes tracebacks of libraries' errors; newlines of our own text stay."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logger_of(topic)
    logger.addHandler(handler)
    try:
        try:
            raise ValueError(FORGED)
        except ValueError as exc:
            logger.warning("%s says\n%s", exc, 5, exc_info=True)
        logger.warning("%d of %s", 1, {"a": 2})
    finally:
        logger.removeHandler(handler)
    written = stream.getvalue()
    assert written.replace("\n", "").isprintable()
    assert written.startswith("good\\x1b]0;owned\\x07\\x9b2J\\u202e")
    assert "ValueError: good\\x1b" in written
    assert "\n5\nTraceback" in written
    assert written.endswith("1 of {'a': 2}\n")


async def test_text_of_a_server_is_escaped_in_logs(
    server: ScriptedServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    message = "denied&#x9b;2J\u202e forged line"  # characters that XML allows
    server.answer = lambda request: error_reply(403, "AccessDenied\u202e\x9b", message)

    def look_up() -> None:
        options: dict[str, Any] = {**KEYS, "endpoint_url": server.url, "local": False}
        # Even on a slow machine, the answer comes before the lookup times out.
        with Cache.open("s3://bucket/p", **options, lookup_timeout_s=120.0) as cache:
            found = cache.lookup(KEY)
            assert isinstance(found, Miss)
            cache.stats()

    await asyncio.to_thread(look_up)
    assert caplog.records
    for record in caplog.records:
        assert record.getMessage().isprintable()
        assert "forged line" in record.getMessage() or "AccessDenied" in record.getMessage()


@pytest.mark.parametrize(
    "command", ["ls", "ls --long", "inspect", "verify", "mirror", "rm --dry-run"]
)
def test_metadata_forges_no_line_of_a_command(
    command: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An entry with forged metadata has as many lines as one with good metadata."""
    monkeypatch.setenv("S3CACHE_LOCAL_DIR", str(tmp_path / "local"))
    shelf = Shelf(tmp_path / "remote")
    key = f"a{'0' * 8}-{KEY}"
    arguments = command.split()
    arguments += {
        "inspect": [key, "--url", shelf.url],
        "mirror": [shelf.url, f"file://{tmp_path}/other?create=1"],
        "rm": ["--all", "--url", shelf.url],
    }.get(arguments[0], ["--url", shelf.url])
    counts = []
    for word in ("good", FORGED):
        shelf.add(key, torch=word, tag=word, device=word)
        capsys.readouterr()
        main([*arguments])
        written = capsys.readouterr()
        lines = (written.out + written.err).split("\n")
        assert all(line.isprintable() for line in lines)
        counts.append(len(lines))
    assert counts[0] == counts[1] > 1


def test_control_characters_are_escaped_in_pages() -> None:
    assert escape(FORGED).replace("\n", "").isprintable()
    assert escape("<a>\u202e") == "&lt;a&gt;\\u202e"


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
