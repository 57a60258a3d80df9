"""Answers of servers that no S3 server would give do no harm, nor does the text of entries.

No message contains a possible password, even if a URL is wrong or a proxy fails.
"""

from __future__ import annotations

import asyncio
import io
import logging
import traceback
from pathlib import Path
from typing import Any, get_args

import pytest

from s3cache import errors
from s3cache.cache import Cache, Miss
from s3cache.cli import main
from s3cache.errors import ConfigError, PermanentError, S3CacheError, TransientError
from s3cache.settings import Settings
from s3cache.store import S3Options, S3Store
from s3cache.trust import Algorithm, generate
from s3cache.util.logs import Topic, logger_of
from s3cache.util.options import kinds
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
            assert isinstance(cache.lookup(KEY), Miss)

    await asyncio.to_thread(look_up)
    assert caplog.records
    for record in caplog.records:
        assert record.getMessage().isprintable()
        assert "forged line" in record.getMessage() or "AccessDenied" in record.getMessage()


def test_metadata_forges_no_line_of_a_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry with forged metadata has as many lines as one with good metadata."""
    monkeypatch.setenv("S3CACHE_LOCAL_DIR", str(tmp_path / "local"))
    shelf, key, counts = Shelf(tmp_path / "remote"), f"a{'0' * 8}-{KEY}", list[list[int]]()
    where = ["--url", shelf.url]
    for word in ("good", FORGED):
        shelf.add(key, torch=word, tag=word, device=word)
        counts.append([])
        for arguments in (
            *(["ls", *where], ["ls", "--long", *where], ["inspect", key, *where]),
            *(["verify", *where], ["stats", "--by=tag", *where]),
            ["rm", "--dry-run", "--all", *where],
            ["mirror", shelf.url, f"file://{tmp_path}/{word[:4]}{len(counts)}?create=1"],
        ):
            capsys.readouterr()
            main(arguments)
            written = capsys.readouterr()
            lines = (written.out + written.err).split("\n")
            assert all(line.isprintable() for line in lines)
            counts[-1].append(len(lines))
    assert counts[0] == counts[1]
    assert min(counts[0]) > 1


def test_control_characters_are_escaped_in_pages() -> None:
    assert escape(FORGED).replace("\n", "").isprintable()
    assert escape("<a>\u202e") == "&lt;a&gt;\\u202e"


# -- bodies

MIB = 1 << 20

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


# -- secrets

SECRET = "SeCrEt"
SERVERS = [
    f"http://user:pa/{SECRET}@host",
    f"http://user:{SECRET}@ho\u2100st",  # not a name once it is normalized
    f"http://[user:{SECRET}]@host",
    f"http:user:{SECRET}@host",
    f"http://user:{SECRET}@host/?a#b",
]


@pytest.mark.parametrize(
    ("option", "server"),
    [
        *((option, server) for option in ("endpoint_url", "proxy") for server in SERVERS),
        # botocore would repeat it in each message about an unreachable server.
        ("AWS_ENDPOINT_URL_S3", SERVERS[0]),
        ("AWS_ENDPOINT_URL_S3", f"http://user:{SECRET}@host"),
        ("AWS_ENDPOINT_URL_S3", "http://host:port"),
    ],
)
def test_an_invalid_server_url_is_not_repeated(
    option: str, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    where: Any = {option: server} if option.islower() else {}
    if not where:
        monkeypatch.setenv(option, server)
    with pytest.raises(ConfigError, match=option.removesuffix("_S3")) as raised:
        S3Options("bucket", anonymous=True, **where)
    assert SECRET not in "".join(traceback.format_exception(raised.value))


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 407 No\r\ncontent-length: 0\r\n\r\n", b"what?\r\n\r\n"]
)
@pytest.mark.parametrize("scheme", ["https", "http"])
async def test_a_proxy_that_fails_is_named_without_its_password(scheme: str, answer: bytes) -> None:
    """The password is sent to the proxy, however."""
    heads: list[bytes] = []

    async def serve(head: bytes, writer: asyncio.StreamWriter) -> None:
        heads.append(head)
        writer.write(answer)
        await writer.drain()

    async with raw_server(serve) as url:
        proxy = f"http://user:{SECRET}@{url.removeprefix('http://')}"
        server = f"{scheme}://127.0.0.1:1"
        keys: dict[str, Any] = {"access_key": "key", "secret_key": SECRET}
        options = S3Options("bucket", "p", endpoint_url=server, proxy=proxy, region="r", **keys)
        store = S3Store(options)
        with pytest.raises(Exception, match=r"p\?endpoint_url=") as raised:
            await store.get("k")
        await store.aclose()
    assert SECRET not in "".join(traceback.format_exception(raised.value))
    assert b"proxy-authorization: basic dxnlcjptzunyrxq=" in heads[0].lower()


PROXIES = [
    f"http://user:{SECRET}@ho\u2100st:3128",
    f"http://user:{SECRET}@host:port",
    f"http://user:pa/{SECRET}@host:3128",
    f"http://[user:{SECRET}@host",
    f"socks5://user:{SECRET}@host:1080",
]


@pytest.mark.parametrize("proxy", PROXIES)
async def test_an_invalid_proxy_url_is_not_repeated(
    proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many machines have a proxy in the environment, which only botocore reads."""
    monkeypatch.setenv("HTTPS_PROXY", proxy)
    server = "https://s3.example"
    store = S3Store(S3Options("bucket", endpoint_url=server, access_key="a", secret_key="b"))
    with pytest.raises(S3CacheError) as raised:
        await store.get("k")
    await store.aclose()
    assert SECRET not in "".join(traceback.format_exception(raised.value))


#: Secrets and parts of them, as users may paste them, and the text that no message may contain.
PASTED = [
    (pasted, key[10:30])
    for whole in (generate("ci", algorithm).secret_text() for algorithm in Algorithm)
    for key in [whole.rpartition(":")[2]]
    # A random key may begin with any character of base64, even one that cannot begin a name.
    for pasted in (
        whole,
        key,
        f"+{key[1:]}",
        f"/{key[1:]}",
        f"main={whole}",
        whole[3:],
        f"ci={key}",
    )
]


@pytest.mark.parametrize(("pasted", "secret"), PASTED, ids=range(len(PASTED)))
def test_no_message_contains_a_signing_key_given_to_any_option(
    pasted: str, secret: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The key is in the wrong option or variable, or a part of it is missing."""
    refused = 0
    # Messages name these places.
    names = sorted({*kinds(Settings)} - {"url", "local_dir", "metrics_file"})
    for number, name in enumerate(names, PASTED.index((pasted, secret))):  # each way in turn
        by_code: dict[str, Any] = {name: pasted} if number % 2 else {}
        with monkeypatch.context() as context:
            if not by_code:
                context.setenv(f"S3CACHE_{name.upper()}", pasted)
            try:
                with Cache.open(**{"local": False, **by_code}) as cache:
                    message = repr(cache.settings) + repr(cache)
            except ConfigError as exc:
                refused += 1
                message = "".join(traceback.format_exception(exc))
        assert secret not in message, name
    assert refused > 20
    assert secret not in caplog.text
