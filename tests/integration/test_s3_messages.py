"""Each failure of a bucket or of the network between is named, with its cause and a fix."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path

import pytest

from s3cache.errors import AccessDeniedError, PermanentError, StoreError, TransientError
from s3cache.store import RetryingStore, RetryPolicy
from tests.support.contract import VERBS
from tests.support.scripted import Reply, ScriptedServer, error_reply

KMS_DENIED = (
    "User: arn:aws:iam::1:user/ci is not authorized to perform: kms:Decrypt on resource: "
    "arn:aws:kms:eu-west-1:1:key/k because no identity-based policy allows the kms:Decrypt action"
)
NO_MESSAGE = Reply(403, {}, b"<Error><Code>AccessDenied</Code><Message/></Error>")
PAGE = Reply(
    200, {"content-type": "text/html; charset=utf-8"}, b"<!doctype html><title>Log in<br></title>"
)


pytestmark = pytest.mark.usefixtures("no_proxy")


async def failure(call: Awaitable[object]) -> StoreError:
    with pytest.raises(StoreError) as caught:
        await call
    return caught.value


@pytest.mark.parametrize(
    ("reply", "parts", "other"),
    [
        (error_reply(400, "InvalidTag", "a bad tag"), ["Tag a bad tag", "its message"], "no body"),
        (Reply(400), ["400 Bad Request", "has no body"], "400 400"),
        (error_reply(404, "NoSuchUpload", "gone"), ["NoSuchUpload gone", "its message"], "address"),
        (error_reply(403, "AllAccessDisabled", "paid?"), ["AllAccessDisabled paid?"], "GetObject"),
        (NO_MESSAGE, ["(403 AccessDenied)"], "None"),
        (error_reply(403, "AccessDenied", KMS_DENIED), ["allow kms:Decrypt", "KMS key"], "s3:Put"),
        (
            error_reply(403, "AccessDenied", KMS_DENIED.replace("kms:Decrypt", "s3:GetObject")),
            ["allow s3:GetObject"],
            "KMS key",
        ),
        (Reply(407), ["proxy credentials are missing or wrong", "S3CACHE_PROXY"], "its message"),
    ],
    ids=lambda value: None if isinstance(value, (list, str)) else f"{value.status}",
)  # fmt: skip
async def test_an_answer_leads_to_advice_that_fits(
    server: ScriptedServer, reply: Reply, parts: list[str], other: str
) -> None:
    server.answer = lambda _: reply
    text = str(await failure(server.open().get("k")))
    for part in parts:
        assert part in text
    assert other not in text


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"sse": "C", "sse_c_key": bytes(32)}, "BlockedEncryptionTypes"),
        ({"sse": "aws:kms"}, "kms:GenerateDataKey"),
    ],
)
async def test_a_refusal_with_an_encryption_names_its_own_conditions(
    server: ScriptedServer, options: dict[str, object], name: str
) -> None:
    server.answer = lambda _: error_reply(403, "AccessDenied", "Access Denied")
    text = str(await failure(server.open(**options).put("k", b"x")))
    assert name in text
    assert "s3:PutObject" in text
    assert name not in str(await failure(server.open().put("k", b"x")))


@pytest.mark.parametrize("status", [200, 403, 511])
async def test_a_web_page_is_named_with_its_place(server: ScriptedServer, status: int) -> None:
    """A lookup must not take the page for a damaged entry."""
    server.answer = lambda _: Reply(status, PAGE.headers, PAGE.body)
    store = server.open(multipart_bytes=5 << 20, part_bytes=5 << 20)
    more = (lambda store, key: store.list_page(key), lambda s, key: s.put(key, bytes(6 << 20)))
    for call in (*VERBS.values(), *more):
        error = await failure(call(store, "k"))
        for part in (server.url, "web page", "portal"):
            assert part in str(error)
        assert isinstance(error, AccessDeniedError if status == 403 else TransientError)


async def test_an_object_or_an_empty_answer_may_have_the_type_of_a_page(
    server: ScriptedServer,
) -> None:
    """Swift sends this type with empty answers, and an upload by hand may have set it."""
    html = PAGE.headers
    server.answer = lambda request: Reply(
        200, {**html, "etag": '"e"'}, b"data" if request.method == "GET" else b""
    )
    store = server.open()
    await store.put("k", b"data")
    assert await store.get("k") == b"data"
    server.answer = lambda _: Reply(502, html, PAGE.body)
    assert "web page" not in str(await failure(store.get("k")))


@pytest.mark.parametrize("status", [301, 302, 307])
async def test_a_redirect_says_where_to(server: ScriptedServer, status: int) -> None:
    server.answer = lambda _: Reply(status, {"location": "https://login.example/x?token=hunter2"})
    error = await failure(server.open().get("k"))
    assert "it leads to https://login.example/x)" in str(error)
    assert "hunter2" not in str(error)


async def test_a_name_that_is_not_known_comes_with_the_resolvers_own_words(
    server: ScriptedServer,
) -> None:
    text = str(await failure(server.open(endpoint_url="https://no-such-host.invalid").get("k")))
    assert "no-such-host.invalid" in text
    assert "known" in text or "resolution" in text  # the system's words differ


@pytest.mark.parametrize("variable", ["HTTPS_PROXY", "https_proxy", None])
async def test_a_timeout_names_server_and_proxy(
    variable: str | None,
    server: ScriptedServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server.answer = lambda _: Reply(200, delay_s=2)
    address = server.url.removeprefix("http://")
    options = {"endpoint_url": "https://s3.example", "connect_timeout_s": 0.1}
    if variable:
        monkeypatch.setenv(variable, f"http://me:hunter2@{address}")
    else:
        options["proxy"] = f"http://me:hunter2@{address}"
    store = server.open(**options)
    quick = RetryingStore(store, RetryPolicy(1, total_timeout_s=0.05, attempt_timeout_s=0.05))
    for error in await failure(store.get("k")), await failure(quick.get("k")):
        assert isinstance(error, TransientError)
        assert "https://s3.example" in str(error)
        assert f"(through {variable or 'proxy'}=" in str(error)
        assert address in str(error)
        assert "hunter2" not in str(error)


async def test_a_proxy_that_wants_credentials_is_named(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answer = lambda _: Reply(407)
    monkeypatch.setenv("HTTPS_PROXY", server.url)
    error = await failure(server.open(endpoint_url="https://s3.example").get("k"))
    assert type(error) is PermanentError
    assert "proxy credentials are missing or wrong" in str(error)
    assert f"HTTPS_PROXY={server.url}" in str(error)


async def test_a_bundle_of_certificates_that_vanished_is_named(
    server: ScriptedServer, tmp_path: Path
) -> None:
    bundle = tmp_path / "ca.pem"
    bundle.touch()
    options = {"endpoint_url": "https://127.0.0.1:9", "ca_bundle": str(bundle)}
    store = await asyncio.to_thread(lambda: server.open(**options))
    bundle.unlink()
    assert "trusted certificates cannot be read" in str(await failure(store.get("k")))
