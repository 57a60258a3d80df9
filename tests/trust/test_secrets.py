"""No message contains a possible password, even if a URL is wrong or a proxy fails."""

from __future__ import annotations

import asyncio
import traceback
from typing import Any

import pytest

from s3cache.cache import Cache
from s3cache.errors import ConfigError, S3CacheError
from s3cache.settings import Settings
from s3cache.store import S3Options, S3Store
from s3cache.trust import Algorithm, generate
from s3cache.util.options import kinds
from tests.support.scripted import raw_server

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
    "answer",
    [b"HTTP/1.1 407 No\r\ncontent-length: 0\r\n\r\n", b"HTTP/1.1 500 x\r\n\r\n", b"what?\r\n\r\n"],
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
    (pasted, whole.rpartition(":")[2][10:30])
    for algorithm in Algorithm
    for whole in [generate("ci", algorithm).secret_text()]
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
@pytest.mark.parametrize("by", ["code", "environment"])
def test_no_message_contains_a_signing_key_given_to_any_option(
    pasted: str,
    secret: str,
    by: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The key is in the wrong option, or a part of it is missing."""
    refused = 0
    for name in sorted(kinds(Settings)):
        if name in ("url", "local_dir", "metrics_file"):  # messages name these places
            continue
        options = {name: pasted} if by == "code" else {}
        with monkeypatch.context() as context:
            if by == "environment":
                context.setenv(f"S3CACHE_{name.upper()}", pasted)
            try:
                with Cache.open(**{"local": False, **options}) as cache:  # type: ignore[arg-type]
                    message = repr(cache.settings) + repr(cache)
            except ConfigError as exc:
                refused += 1
                message = "".join(traceback.format_exception(exc))
        assert secret not in message, name
    assert refused > 20
    assert secret not in caplog.text
