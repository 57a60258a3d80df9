"""Requests of S3Store, its handling of odd answers, and the message for each failure."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from s3cache.errors import (
    AccessDeniedError,
    ClosedError,
    MissingContainerError,
    PermanentError,
    PreconditionError,
    StoreError,
    TransientError,
)
from s3cache.store import RetryingStore, RetryPolicy, S3Options, S3Store
from tests.support.contract import VERBS
from tests.support.scripted import Reply, Request, ScriptedServer, error_reply

pytestmark = pytest.mark.usefixtures("no_proxy")

MIB = 1 << 20
PUT_OK = Reply(headers={"etag": '"e"'})
THERE = Reply(headers={"last-modified": "Wed, 01 Jan 2025 00:00:00 GMT"})
GONE = error_reply(404, "NoSuchKey")
EXISTS = error_reply(412, "PreconditionFailed")


def ranged(data: bytes, request: Request, etag: str = '"e"') -> Reply:
    first, last = map(int, request.headers["range"].removeprefix("bytes=").split("-"))
    part = data[first : last + 1]
    stated = f"bytes {first}-{first + len(part) - 1}/{len(data)}"
    return Reply(206, {"content-range": stated, "etag": etag}, part)


def by_method(**replies: Reply | Iterable[Reply]) -> Callable[[Request], Reply]:
    """Answer requests by method: with one reply, or with several, the last one from then on."""
    left = {name: [r] if isinstance(r, Reply) else [*r] for name, r in replies.items()}

    def answer(request: Request) -> Reply:
        several = left[request.method]
        return several.pop(0) if len(several) > 1 else several[0]

    return answer


# --- what is sent


async def test_the_digest_of_the_body_is_signed_without_a_trailer(server: ScriptedServer) -> None:
    server.answer = lambda request: PUT_OK
    await server.open().put("k", b"some bytes", metadata={"writer": "me"})
    (put,) = server.requests
    assert (put.target, put.body) == ("/bucket/p/k", b"some bytes")
    assert put.headers["x-amz-content-sha256"] == hashlib.sha256(b"some bytes").hexdigest()
    assert put.headers["x-amz-meta-writer"] == "me"
    assert put.headers["content-type"] == "application/octet-stream"
    assert "s3cache/" in put.headers["user-agent"]
    absent = {"x-amz-trailer", "transfer-encoding", "expect", "x-amz-checksum-crc32"}
    assert absent.isdisjoint(put.headers)


async def test_requests_state_encryption_storage_class_and_payer(server: ScriptedServer) -> None:
    server.answer = lambda request: PUT_OK
    encryption = {"sse": "aws:kms", "sse_kms_key_id": "key-id"}
    others = {"storage_class": "ONEZONE_IA", "request_payer": "requester"}
    store = server.open(conditional_create="native", **encryption, **others)
    await store.put("k", b"x", mode="create")
    await store.delete("k")
    put, delete = (request.headers for request in server.requests)
    wanted = {
        "x-amz-server-side-encryption": "aws:kms",
        "x-amz-server-side-encryption-aws-kms-key-id": "key-id",
        "x-amz-storage-class": "onezone_ia",
        "x-amz-request-payer": "requester",
        "if-none-match": "*",
    }
    assert {name: put[name] for name in wanted} == wanted
    assert delete["x-amz-request-payer"] == "requester"


async def test_reads_and_writes_send_a_customers_key(server: ScriptedServer) -> None:
    data = b"0123456789"
    server.answer = lambda r: {"PUT": PUT_OK, "HEAD": THERE}.get(r.method) or ranged(data, r)
    store = server.open(sse="C", sse_c_key=b"k" * 32, part_bytes=4)
    await store.put("k", data)
    await store.head("k")
    assert await store.get("k") == data
    algorithm = "x-amz-server-side-encryption-customer-algorithm"
    assert [request.headers[algorithm] for request in server.requests] == ["aes256"] * 5


async def test_anonymous_requests_are_not_signed(server: ScriptedServer) -> None:
    server.answer = lambda request: GONE
    store = server.open(access_key=None, secret_key=None, anonymous=True)
    assert await store.get("k") is None
    assert "authorization" not in server.requests[0].headers


async def test_botocore_does_not_retry(server: ScriptedServer) -> None:
    server.answer = lambda request: error_reply(503, "SlowDown")
    with pytest.raises(TransientError, match="fewer requests"):
        await server.open().get("k")
    assert len(server.requests) == 1


# --- reading


async def test_a_small_object_takes_one_request(server: ScriptedServer) -> None:
    server.answer = lambda request: ranged(b"abc", request)
    assert await server.open().get("k") == b"abc"
    assert len(server.requests) == 1


@pytest.mark.parametrize("rest", ["another version", "none"])
async def test_parts_of_two_versions_are_never_joined(server: ScriptedServer, rest: str) -> None:
    """The new version is as long as the old one, or shorter."""

    def answer(request: Request) -> Reply:
        if rest == "none" and not request.headers["range"].startswith("bytes=0-"):
            return error_reply(416, "InvalidRange")
        return ranged(b"x" * 100, request, etag=f'"{len(server.requests)}"')

    server.answer = answer
    with pytest.raises(TransientError, match="overwritten"):
        await server.open(part_bytes=40).get("k")


@pytest.mark.parametrize("cut_part", [0, 40])
async def test_a_body_cut_short_is_transient(server: ScriptedServer, cut_part: int) -> None:
    def answer(request: Request) -> Reply:
        reply = ranged(b"x" * 100, request)
        if request.headers["range"].startswith(f"bytes={cut_part}-"):
            reply.length, reply.body = len(reply.body), reply.body[:-1]
        return reply

    server.answer = answer
    with pytest.raises(TransientError):
        await server.open(part_bytes=40).get("k")


async def test_a_huge_object_is_refused_after_its_first_range(server: ScriptedServer) -> None:
    """A writer to the bucket must not be able to fill the memory of readers."""
    server.answer = lambda request: ranged(b"x" * 100, request)
    with pytest.raises(PermanentError, match="max_object_bytes"):
        await server.open(part_bytes=40, max_object_bytes=99).get("k")
    assert len(server.requests) == 1


async def test_objects_of_a_server_without_ranges_are_read_whole(server: ScriptedServer) -> None:
    server.answer = lambda request: Reply(body=b"0123456789")
    store = server.open(part_bytes=4)
    assert await store.get("k") == b"0123456789"
    assert await store.get_range("k", 3) == b"012"


async def test_a_silent_server_is_transient(server: ScriptedServer) -> None:
    server.answer = lambda request: Reply(delay_s=5)
    with pytest.raises(TransientError, match="took too long"):
        await server.open(read_timeout_s=0.1).get("k")


# --- create


async def test_the_first_create_shows_that_the_server_honours_the_condition(
    server: ScriptedServer,
) -> None:
    """It is written once more. No object is written that belongs to no entry."""
    server.answer = lambda r: (
        GONE if r.method == "HEAD" else EXISTS if len(server.made("PUT", r.target)) > 1 else PUT_OK
    )
    store = server.open()
    assert await store.atomic_create() is None
    await asyncio.gather(*(store.put(f"k{i}", b"x", mode="create") for i in range(5)))
    assert await store.atomic_create()
    assert len(server.made("PUT")) == 6
    assert len({put.target for put in server.made("PUT")}) == 5


DENIED, BUSY = error_reply(403, "AccessDenied"), error_reply(503, "SlowDown")
REPLACED = Reply(headers={"etag": '"another"'})


@pytest.mark.parametrize(
    ("puts", "heads", "kind", "is_atomic"),
    [
        ([EXISTS], [GONE], PreconditionError, True),
        ([PUT_OK, DENIED], [DENIED], None, True),
        ([BUSY], [GONE, BUSY], TransientError, None),
        ([PUT_OK], [GONE, REPLACED], PreconditionError, False),
    ],
    ids=["exists", "may not overwrite", "outage", "replaced at once"],
)
async def test_a_create_shows_more_by_other_answers(
    server: ScriptedServer, puts: list[Reply], heads: list[Reply], kind: Any, is_atomic: bool | None
) -> None:
    server.answer = by_method(PUT=puts, HEAD=heads)
    store = server.open()
    (error,) = await asyncio.gather(store.put("k", b"x", mode="create"), return_exceptions=True)
    assert type(error) is (kind or type(None))
    assert await store.atomic_create() is is_atomic
    assert "if-none-match" in server.made("PUT")[0].headers


@pytest.mark.parametrize("refusal", [None, error_reply(501, "NotImplemented")])
async def test_a_store_checks_for_the_object_first_without_the_condition(
    server: ScriptedServer, refusal: Reply | None
) -> None:
    """The server ignores the condition or refuses it."""
    server.answer = lambda r: (
        GONE if r.method == "HEAD" else ("if-none-match" in r.headers and refusal) or PUT_OK
    )
    store = server.open()
    await store.put("k", b"x", mode="create")
    assert await store.atomic_create() is False
    server.answer = lambda request: THERE
    with pytest.raises(PreconditionError):
        await store.put("k", b"x", mode="create")
    assert server.requests[-1].method == "HEAD"


async def test_a_server_that_is_known_is_not_asked(server: ScriptedServer) -> None:
    """A small object takes one request. For a large one, a question may save sending it."""
    server.answer = by_method(PUT=PUT_OK, HEAD=[GONE, THERE])
    store = server.open(conditional_create="native")
    await store.put("k", b"x", mode="create")
    await store.put("l", bytes(2 << 20), mode="create")
    with pytest.raises(PreconditionError):
        await store.put("l", bytes(2 << 20), mode="create")
    assert [request.method for request in server.requests] == ["PUT", "HEAD", "PUT", "HEAD"]
    assert await S3Store(S3Options("bucket", "p")).atomic_create()


# --- parts

COMPLETED = Reply(
    body=b'<CompleteMultipartUploadResult><ETag>"e"</ETag></CompleteMultipartUploadResult>'
)
LARGE = bytes(11 * MIB)
IN_PARTS: dict[str, Any] = {"multipart_bytes": 5 * MIB, "part_bytes": 5 * MIB}


@pytest.fixture
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("s3cache.store._s3._PAUSES_S", (0.0, 0.0, 0.0))


def parts_answer(request: Request, complete: Reply, server_name: str = "AmazonS3") -> Reply:
    if request.method == "POST" and "uploads" in request.target:
        begun = b"<InitiateMultipartUploadResult><UploadId>u1</UploadId>"
        return Reply(200, {"server": server_name}, begun + b"</InitiateMultipartUploadResult>")
    return {"HEAD": GONE, "POST": complete}.get(request.method, PUT_OK)


@pytest.mark.usefixtures("_hasty")
@pytest.mark.parametrize("lost", ["none of", "PUT partNumber=2", "POST uploadId=u1"])
async def test_a_large_object_is_sent_in_parts_and_only_failed_requests_again(
    server: ScriptedServer, lost: str
) -> None:
    """A lost request costs one part instead of hundreds of megabytes."""
    method, name = lost.split()
    failures = [error_reply(500, "InternalError")]

    def answer(request: Request) -> Reply:
        is_lost = request.method == method and name in request.target and failures
        return failures.pop() if is_lost else parts_answer(request, COMPLETED)

    server.answer = answer
    await server.open(**IN_PARTS).put("k", LARGE)
    assert len(server.made("POST", "uploads")) == 1
    sizes = [len(request.body) // MIB for request in server.made("PUT")]
    assert sorted(sizes) == ([1, 5, 5, 5] if method == "PUT" else [1, 5, 5])
    assert not server.made("DELETE")


@pytest.mark.usefixtures("_hasty")
@pytest.mark.parametrize(
    ("completions", "kind"),
    [
        ([error_reply(200, "SlowDown")], TransientError),
        ([error_reply(200, "InternalError")], TransientError),
        ([Reply(body=b"<Complete")], TransientError),
        ([Reply(body=b"")], TransientError),
        ([error_reply(404, "NoSuchBucket")], MissingContainerError),
        # The server no longer knows the upload; a later retry of the save finds the object.
        ([error_reply(500, "InternalError"), error_reply(404, "NoSuchUpload")], TransientError),
    ],
    ids=["slow-down", "internal", "cut", "empty", "no-bucket", "lost answer"],
)
async def test_a_failed_completion_is_an_error_and_frees_the_parts(
    server: ScriptedServer, completions: list[Reply], kind: type[Exception]
) -> None:
    """S3 may answer 200 and put the error into the body."""
    complete = by_method(POST=completions)
    server.answer = lambda request: (
        complete(request)
        if request.method == "POST" and "uploadId" in request.target
        else parts_answer(request, COMPLETED)
    )
    with pytest.raises(kind):
        await server.open(**IN_PARTS).put("k", LARGE)
    assert len(server.made("DELETE", "uploadId=u1")) == 1


async def test_a_cancelled_upload_frees_its_parts(server: ScriptedServer) -> None:
    started = asyncio.Event()

    def answer(request: Request) -> Reply:
        if "partNumber" in request.target:
            started.set()
            return Reply(delay_s=30)
        return parts_answer(request, COMPLETED)

    server.answer = answer
    task = asyncio.ensure_future(server.open(**IN_PARTS).put("k", LARGE))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(server.made("DELETE", "uploadId=u1")) == 1


@pytest.mark.parametrize(("name", "in_parts"), [("AmazonS3", True), ("MinIO", True), ("x", False)])
async def test_create_sends_parts_if_the_server_supports_conditional_completion(
    server: ScriptedServer, name: str, in_parts: bool
) -> None:
    server.answer = lambda request: parts_answer(request, COMPLETED, server_name=name)
    await server.open(**IN_PARTS).put("k", LARGE, mode="create")
    if in_parts:
        assert server.made("POST", "uploadId")[0].headers["if-none-match"] == "*"
    else:
        (put,) = server.made("PUT", "/p/k")
        assert (put.headers["if-none-match"], len(put.body)) == ("*", len(LARGE))
        assert len(server.made("DELETE", "uploadId=u1")) == 1


# --- the store as a whole


@pytest.mark.parametrize("status", [301, 302, 303, 307])
async def test_redirects_are_named_and_not_followed(server: ScriptedServer, status: int) -> None:
    """Otherwise the other server would get the session token or a customer's key."""
    async with ScriptedServer() as other:
        server.answer = lambda _: Reply(status, {"location": f"{other.url}/x?token=hunter2"})
        error = await failure(server.open(session_token="token").put("k", b"x"))
        assert other.requests == []
    assert type(error) is PermanentError
    assert f"it leads to {other.url}/x)" in str(error)
    assert "hunter2" not in str(error)


def test_a_store_works_on_one_event_loop_until_it_is_closed(s3_options: S3Options) -> None:
    store = S3Store(s3_options)

    async def second() -> None:
        with pytest.raises(ClosedError, match="another event loop"):
            await store.get("k")

    loop = asyncio.new_event_loop()
    loop.run_until_complete(store.put("k", b"x"))
    asyncio.run(second())
    loop.run_until_complete(store.aclose())
    with pytest.raises(ClosedError, match="closed"):
        loop.run_until_complete(store.get("k"))
    loop.close()


KMS_DENIED = (
    "User: arn:aws:iam::1:user/ci is not authorized to perform: kms:Decrypt on resource: "
    "arn:aws:kms:eu-west-1:1:key/k because no identity-based policy allows the kms:Decrypt action"
)
NO_MESSAGE = Reply(403, {}, b"<Error><Code>AccessDenied</Code><Message/></Error>")
PAGE = Reply(
    200, {"content-type": "text/html; charset=utf-8"}, b"<!doctype html><title>Log in<br></title>"
)


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


async def test_a_name_that_is_not_known_comes_with_the_resolvers_own_words(
    server: ScriptedServer,
) -> None:
    text = str(await failure(server.open(endpoint_url="https://no-such-host.invalid").get("k")))
    assert "no-such-host.invalid" in text
    assert "known" in text or "resolution" in text  # the system's words differ


@pytest.mark.parametrize("variable", ["https_proxy", None])
async def test_a_timeout_names_server_and_proxy(
    variable: str | None, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answer = lambda _: Reply(200, delay_s=1)
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
