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
    return ClientError(
        {
            "Error": {"Code": code, "Message": message, **more},
            "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": {}},
        },
        "GetObject",
    )


def translated(error: Exception) -> StoreError:
    result = translate(error, op="get", store="s3://b", key="k")
    assert isinstance(result, StoreError)
    return result


@pytest.mark.parametrize(
    ("status", "codes"),
    [
        (200, ["InternalError"]),
        (400, ["RequestTimeout", "BadDigest", "XAmzContentSHA256Mismatch", "IncompleteBody"]),
        (409, ["ConditionalRequestConflict", "OperationAborted"]),
        (429, ["TooManyRequests", ""]),
        (500, ["InternalError"]),
        (502, [""]),
        (503, ["SlowDown", "ServiceUnavailable"]),
        (504, ["whatever"]),
    ],
)
def test_temporary_answers_are_transient_errors(status: int, codes: list[str]) -> None:
    for code in codes:
        assert type(translated(answer(status, code))) is TransientError


@pytest.mark.parametrize(
    ("status", "code", "kind", "text"),
    [
        (403, "InvalidAccessKeyId", AccessDeniedError, "AWS_ACCESS_KEY_ID"),
        (403, "SignatureDoesNotMatch", AccessDeniedError, "secret key"),
        (400, "ExpiredToken", AccessDeniedError, "expired"),
        (403, "AccessDenied", AccessDeniedError, "s3:DeleteObject"),
        (401, "", AccessDeniedError, "credentials"),
        (403, "RequestTimeTooSkewed", PermanentError, "clock"),
        (404, "NoSuchBucket", MissingContainerError, "create it"),
        (404, "", PermanentError, "endpoint_url"),
        (301, "PermanentRedirect", PermanentError, "region="),
        (400, "AuthorizationHeaderMalformed", PermanentError, "region="),
        (403, "QuotaExceeded", NoSpaceError, "quota"),
        (507, "XMinioStorageFull", NoSpaceError, "full"),
        (501, "NotImplemented", PermanentError, "conditional_create=check"),
        (400, "InvalidArgument", PermanentError, "refuses"),
        (412, "PreconditionFailed", PreconditionError, "already there"),
    ],
)
def test_other_answers_name_cause_and_fix(
    status: int, code: str, kind: type[StoreError], text: str
) -> None:
    error = translated(answer(status, code))
    assert type(error) is kind
    assert text in str(error)
    assert str(status) in str(error)


def test_an_error_names_the_place_and_the_region_in_one_short_line() -> None:
    found = translated(answer(503, "", "<html>\n" * 1000))
    assert (found.op, found.store, found.key) == ("get", "s3://b", "k")
    assert "\n" not in str(found)
    assert len(str(found)) < 600
    error = answer(400, "AuthorizationHeaderMalformed", Region="eu-west-3")
    assert "eu-west-3" in str(translated(error))


@pytest.mark.parametrize(
    "error",
    [
        boto.EndpointConnectionError(endpoint_url="http://x", error="refused"),
        boto.ReadTimeoutError(endpoint_url="http://x", error="t"),
        boto.ProxyConnectionError(proxy_url="http://x", error="t"),
        boto.HTTPClientError(error="t"),
        boto.IncompleteReadError(actual_bytes=1, expected_bytes=2),
        boto.SSLError(endpoint_url="https://x", error="connection reset"),
        aiohttp.ClientPayloadError("short"),
        aiohttp.ServerDisconnectedError(),
        asyncio.TimeoutError(),
        OSError(5, "input/output"),
        ssl.SSLError("bad record"),
        KeyError("ETag"),  # the answer of a login portal
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_broken_connection_or_a_strange_answer_is_transient(error: Exception) -> None:
    assert type(translated(error)) is TransientError


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (boto.NoCredentialsError(), CredentialsError, "AWS_PROFILE"),
        (boto.PartialCredentialsError(provider="env", cred_var="x"), CredentialsError, "one key"),
        (boto.ProfileNotFound(profile="nope"), CredentialsError, "list-profiles"),
        (boto.UnauthorizedSSOTokenError(), CredentialsError, "aws sso login"),
        (boto.ParamValidationError(report="bad metadata"), PermanentError, "bad metadata"),
        (boto.NoRegionError(), PermanentError, "AWS_DEFAULT_REGION"),
        (
            boto.SSLError(endpoint_url="https://x", error="[SSL: CERTIFICATE_VERIFY_FAILED]"),
            PermanentError,
            "ca_bundle",
        ),
        (TypeError("a defect"), PermanentError, "TypeError: a defect"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_lasting_failures_are_permanent_errors(
    error: Exception, kind: type[StoreError], text: str
) -> None:
    result = translated(error)
    assert type(result) is kind
    assert text in str(result)


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
