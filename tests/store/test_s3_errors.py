"""Every failure of botocore, aiohttp and sockets becomes an s3cache error that names a fix."""

from __future__ import annotations

import asyncio
import ssl
import sys
from typing import Any

import aiohttp
import pytest
from botocore import exceptions as boto
from botocore.exceptions import ClientError

from s3cache.errors import (
    AccessDeniedError,
    CredentialsError,
    MissingContainerError,
    NoSpaceError,
    PermanentError,
    PreconditionError,
    StoreError,
    TransientError,
)
from s3cache.store._s3_errors import answer_of, translate
from tests.support.scripts import run_script


def answer(status: int, code: str = "", message: str = "", **more: Any) -> ClientError:
    details = {"Code": code, "Message": message, **more}
    metadata = {"HTTPStatusCode": status, "HTTPHeaders": {}}
    return ClientError({"Error": details, "ResponseMetadata": metadata}, "GetObject")


URL = "https://x"
# The kind of error, and for each cause what the message names.
TRANSLATED: dict[type[StoreError], list[tuple[Exception, str]]] = {
    TransientError: [
        *(
            (answer(int(status), code), status)
            for status, *codes in map(
                str.split,
                [
                    "200 InternalError",
                    "400 RequestTimeout BadDigest XAmzContentSHA256Mismatch IncompleteBody",
                    "409 ConditionalRequestConflict OperationAborted",
                    "429 TooManyRequests",
                    "500 InternalError",
                    "503 SlowDown ServiceUnavailable",
                    "504 whatever",
                ],
            )
            for code in codes
        ),
        (answer(429), "429"),
        (answer(502), "502"),
        (boto.EndpointConnectionError(endpoint_url=URL, error="refused"), "endpoint_url"),
        (boto.ReadTimeoutError(endpoint_url=URL, error="t"), "took too long"),
        (boto.ProxyConnectionError(proxy_url=URL, error="t"), "proxy"),
        (boto.HTTPClientError(error="t"), "broke"),
        (boto.IncompleteReadError(actual_bytes=1, expected_bytes=2), "too short"),
        (boto.SSLError(endpoint_url=URL, error="connection reset"), "handshake"),
        (aiohttp.ClientPayloadError("short"), "too short"),
        (aiohttp.ServerDisconnectedError(), "broke"),
        (asyncio.TimeoutError(), "took too long"),
        (OSError(5, "input/output"), "broke"),
        (ssl.SSLError("bad record"), "handshake"),
        (KeyError("ETag"), "not S3's"),  # the answer of a login portal
    ],
    AccessDeniedError: [
        (answer(403, "InvalidAccessKeyId"), "AWS_ACCESS_KEY_ID"),
        (answer(403, "SignatureDoesNotMatch"), "secret key"),
        (answer(400, "ExpiredToken"), "expired"),
        (answer(403, "AccessDenied"), "s3:DeleteObject"),
        (answer(401), "credentials"),
    ],
    CredentialsError: [
        (boto.NoCredentialsError(), "AWS_PROFILE"),
        (boto.PartialCredentialsError(provider="env", cred_var="x"), "one key"),
        (boto.ProfileNotFound(profile="nope"), "list-profiles"),
        (boto.UnauthorizedSSOTokenError(), "aws sso login"),
    ],
    MissingContainerError: [(answer(404, "NoSuchBucket"), "create it")],
    NoSpaceError: [
        (answer(403, "QuotaExceeded"), "quota"),
        (answer(507, "XMinioStorageFull"), "full"),
    ],
    PreconditionError: [(answer(412, "PreconditionFailed"), "already there")],
    PermanentError: [
        (answer(403, "RequestTimeTooSkewed"), "clock"),
        (answer(404), "endpoint_url"),
        (answer(301, "PermanentRedirect"), "region="),
        (answer(400, "AuthorizationHeaderMalformed"), "region="),
        (answer(501, "NotImplemented"), "conditional_create=check"),
        (answer(400, "InvalidArgument"), "refuses"),
        (boto.ParamValidationError(report="bad metadata"), "bad metadata"),
        (boto.NoRegionError(), "AWS_DEFAULT_REGION"),
        (boto.SSLError(endpoint_url=URL, error="[SSL: CERTIFICATE_VERIFY_FAILED]"), "ca_bundle"),
        (TypeError("a defect"), "TypeError: a defect"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [(kind, *case) for kind, cases in TRANSLATED.items() for case in cases],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value)[:60],
)
def test_each_failure_becomes_an_error_that_names_cause_and_fix(
    kind: type[StoreError], error: Exception, text: str
) -> None:
    """Only one that may pass by itself is transient."""
    ours = translate(error, op="get", store="s3://b", key="k")
    assert type(ours) is kind
    assert text in str(ours)
    if isinstance(error, ClientError):
        assert str(error.response["ResponseMetadata"]["HTTPStatusCode"]) in str(ours)


def test_an_error_names_the_place_and_the_region_in_one_short_line() -> None:
    page, wrong = answer(503, "", "<html>\n" * 1000), answer(400, "X", Region="eu-west-3")
    text = str(translate(page, op="get", store="s3://b", key="k"))
    assert text.startswith("get s3://b k: ")
    assert "\n" not in text
    assert len(text) < 600
    assert "eu-west-3" in str(translate(wrong, op="get", store="s3://b"))


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (answer(501, "NotImplemented"), True),
        (answer(501, ""), True),
        (answer(400, "InvalidArgument", "Unsupported header If-None-Match"), True),
        (answer(400, "InvalidArgument", "something else"), False),
        (answer(412, "PreconditionFailed"), False),
        (OSError(), False),
    ],
)
def test_refused_conditions_are_recognized(error: Exception, refused: bool) -> None:
    assert answer_of(error).refuses_condition is refused


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_no_store_is_at_fault_in_a_process_without_memory() -> None:
    """This holds even if a library has dropped the MemoryError."""
    done = run_script("""
        import resource
        from s3cache.errors import TransientError, reason_for
        from s3cache.store._s3_errors import translate

        def reasons():
            broken = translate(ConnectionError("closed"), op="get", store="s3://b")
            return [type(broken).__name__, str(reason_for(TransientError("no answer")))]

        before = reasons()
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), resource.RLIM_INFINITY))
        during = reasons()
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print(before, during, reasons())
    """)
    there, none = ["TransientError", "unavailable"], ["PermanentError", "machine"]
    assert done.stdout.strip() == f"{there} {none} {there}"
