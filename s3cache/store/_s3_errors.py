"""Translate errors of botocore, aiohttp and sockets to s3cache's: one table and one function.

botocore is not imported here: exceptions are recognized by the names of their classes, so that
this module is cheap before a client exists.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from s3cache.errors import (
    AccessDeniedError,
    CredentialsError,
    MissingContainerError,
    NoSpaceError,
    PermanentError,
    PreconditionError,
    S3CacheError,
    StoreError,
    TooLargeError,
    TransientError,
    lacks_memory,
)

_CREDENTIALS = (
    "check the environment (AWS_ACCESS_KEY_ID, AWS_PROFILE), the profile or the role in use; "
    "'aws sts get-caller-identity' shows it"
)
_RENEW = "get new ones: 'aws sso login', or the role or secret this machine takes them from"
_LOGIN = "run 'aws sso login'"
_PROFILES = "list them with 'aws configure list-profiles'; check profile=... and AWS_PROFILE"
_ALLOW = (
    "allow s3:GetObject, s3:PutObject and s3:ListBucket on the bucket and prefix (without the "
    "last, S3 answers 403 for an absent object), and s3:DeleteObject to the role that removes"
)
_CREATE = "check its name and endpoint_url, or create it: s3cache never does"
_FREE = "raise the quota, add disks or delete objects"
_CLOCK = "set it (NTP, chrony, 'timedatectl set-ntp true')"
_REGION = "set region=... to the bucket's own, or endpoint_url=... to the server that holds it"
_ENDPOINT = "check endpoint_url, addressing_style, and what stands between (a proxy, a portal)"
_ELSEWHERE = f"{_REGION}; a login portal or a proxy may have answered instead"
_PAGE = "log in at the portal if there is one, or check endpoint_url and the proxies in between"
_PROXY = "check proxy=..., S3CACHE_PROXY, HTTP_PROXY, HTTPS_PROXY and NO_PROXY"
_PROXY_LOGIN = (
    "set S3CACHE_PROXY to http://user:password@host:port, or correct the proxy's variable"
)
_BAD_REQUEST = "expired credentials and a wrong region look like this where the answer has no body"
_CONDITION = "if it was a conditional write, set conditional_create=check"
_ARCHIVE = "use a storage class that can be read at once, and exempt the prefix from archiving"
_TOO_LARGE = (
    "raise its limit, such as client_max_body_size of nginx or proxy-body-size of an ingress; S3 "
    "takes 5 GiB in one request"
)
_PASSING = "it should pass by itself; try again"
_DAMAGED = "the bytes were damaged or cut short on the way; try again"
_BUSY = "the server asks for fewer requests; try again later"
_CERTIFICATES = "set ca_bundle=/path/to/ca.pem or AWS_CA_BUNDLE"
_BUNDLE = "correct ca_bundle, AWS_CA_BUNDLE, REQUESTS_CA_BUNDLE or the profile's ca_bundle"
_CONNECT = "check endpoint_url, DNS, firewall and that the server runs"

# Rows are "names | cause | fix". A name is an error code of the server, an HTTP status for codes
# that are not listed, or the class of an exception without an answer. Any other error is a bug,
# ours or a library's: a retry would not help, and the caller of a cache must not see it raw. AWS's
# codes: https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html XMinio*:
# https://github.com/minio/minio/blob/master/cmd/api-errors.go
_TABLE: dict[type[StoreError], str] = {
    AccessDeniedError: f"""
        InvalidAccessKeyId InvalidClientTokenId | the access key is not known here | {_CREDENTIALS}
        SignatureDoesNotMatch | the secret key is wrong | {_CREDENTIALS}
        401 | the server does not know these credentials | {_CREDENTIALS}
        ExpiredToken ExpiredTokenException InvalidToken | the credentials have expired | {_RENEW}
        AccessDenied 403 | these credentials may not do this | {_ALLOW}
    """,
    CredentialsError: f"""
        NoCredentialsError | no credentials were found | {_CREDENTIALS}
        PartialCredentialsError | one key of a pair is missing | {_CREDENTIALS}
        NoAuthTokenError TokenRetrievalError SSOError | there is no usable SSO token | {_LOGIN}
        ProfileNotFound | there is no such profile | {_PROFILES}
    """,
    MissingContainerError: f"""
        NoSuchBucket | the bucket does not exist | {_CREATE}
    """,
    NoSpaceError: f"""
        QuotaExceeded XMinioAdminBucketQuotaExceeded | the quota is used up | {_FREE}
        InsufficientStorage XMinioStorageFull 507 | the server is full | {_FREE}
    """,
    TooLargeError: f"""
        EntityTooLarge 413 | too large for this server or a proxy before it | {_TOO_LARGE}
    """,
    PreconditionError: """
        PreconditionFailed 412 | an object is already there | read it
    """,
    PermanentError: f"""
        RequestTimeTooSkewed | this machine's clock is more than 15 minutes off | {_CLOCK}
        PermanentRedirect TemporaryRedirect | the bucket is in another region | {_REGION}
        AuthorizationHeaderMalformed | the region is wrong | {_REGION}
        301 302 303 307 308 | the server sends us elsewhere, and we do not go | {_ELSEWHERE}
        407 | proxy credentials are missing or wrong | {_PROXY_LOGIN}
        404 | the server knows no such address | {_ENDPOINT}
        400 | the server refuses the request | {_BAD_REQUEST}
        NotImplemented 501 | the server does not know this request | {_CONDITION}
        InvalidObjectState | the object is in an archive | {_ARCHIVE}
        NoRegionError | no region is set | set region=... or AWS_DEFAULT_REGION
        BotoCoreError | the S3 client refuses | see the cause
        refused | the server refuses the request | see its message
        certificate | the server's certificate is not trusted | {_CERTIFICATES}
        bundle | the file of trusted certificates cannot be read | {_BUNDLE}
        memory | this process has no memory left for it | give it more
        Exception | unexpected | please report it with its traceback
    """,
    TransientError: f"""
        ConditionalRequestConflict OperationAborted 409 | another write is under way | {_PASSING}
        BadDigest XAmzContentSHA256Mismatch | the digest does not match | {_DAMAGED}
        IncompleteBody IncompleteReadError ClientPayloadError | the body is too short | {_DAMAGED}
        RequestTimeout 408 | the server waited too long for the request | {_PASSING}
        SlowDown SlowDownRead SlowDownWrite TooManyRequests 429 | too many requests | {_BUSY}
        Throttling ThrottlingException RequestLimitExceeded | too many requests | {_BUSY}
        InternalError ServiceUnavailable | the server failed | {_PASSING}
        ProxyConnectionError | the proxy does not answer or does not connect us | {_PROXY}
        SSLError | the TLS handshake failed | {_PASSING}
        ConnectTimeoutError | connecting took too long | {_PASSING}
        ReadTimeoutError TimeoutError | the answer took too long | {_PASSING}
        EndpointConnectionError | cannot connect | {_CONNECT}
        page | the answer is a web page, not S3's | {_PAGE}
        HTTPClientError ClientError OSError | the connection broke | {_PASSING}
        ResponseParserError ValueError KeyError | the answer is not S3's | {_ENDPOINT}
    """,
}


_ROWS: dict[str, tuple[type[StoreError], str, str]] = {}
for _kind, _rows in _TABLE.items():
    for _row in _rows.strip().splitlines():
        _names, _cause, _fix = _row.strip().split(" | ")
        _ROWS.update(dict.fromkeys(_names.split(), (_kind, _cause, _fix)))


_ACTION = re.compile(r"to perform: (\w+:\w+)")
# Other statuses with a web page say what they mean, such as a load balancer's 502. For botocore, a
# page under "200 OK" is a 500.
_PAGES = (400, 401, 403, 404, 405, 500, 511)
_SSE_C = (
    "with sse=C, the bucket must not block SSE-C (BlockedEncryptionTypes in its encryption, the "
    "default on AWS), and an object can be read with its own key only"
)
_KMS = "with sse=aws:kms, allow kms:GenerateDataKey and kms:Decrypt on the KMS key too"


class Answer(NamedTuple):
    """What a server answered; without an answer, the status is 0 and the rest is empty."""

    status: int
    code: str
    message: str
    headers: Mapping[str, str]

    @property
    def is_absence(self) -> bool:
        """Return whether the object is absent, or the bucket, for HEAD."""
        return self.code in ("NoSuchKey", "NoSuchVersion", "404")

    @property
    def refuses_condition(self) -> bool:
        """Return whether the server does not support ``If-None-Match`` on a write."""
        is_named = self.status == 400 and "if-none-match" in self.message.lower()
        return is_named or self.status == 501 or self.code == "NotImplemented"

    @property
    def requires_digest(self) -> bool:
        """Return whether the bucket takes only writes that have a digest in a header.

        A bucket with Object Lock and default retention does:
        https://docs.aws.amazon.com/AmazonS3/latest/userguide/object-lock-managing.html
        """
        wanted = f"{self.code} {self.message}".lower()
        return self.status == 400 and ("content-md5" in wanted or "x-amz-checksum" in wanted)


def answer_of(error: Exception) -> Answer:
    # botocore's ClientError has the parsed answer; aiohttp's ClientError does not
    response = getattr(error, "response", None)
    if not isinstance(response, dict):
        return Answer(0, "", "", {})
    metadata, details = response.get("ResponseMetadata", {}), response.get("Error", {})
    headers, message = metadata.get("HTTPHeaders", {}), str(details.get("Message") or "")
    if target := headers.get("location") or details.get("Endpoint"):
        message += f"; it leads to {re.split('[?#]', target)[0]}"  # a query may hold a token
    if region := headers.get("x-amz-bucket-region") or details.get("Region"):
        message += f"; the bucket's region is {region}"
    status, code = int(metadata.get("HTTPStatusCode", 0)), str(details.get("Code", ""))
    return Answer(status, code, message, headers)


def translate(
    error: Exception, *, op: str, store: str, key: str = "", sse: str = "none", via: str = ""
) -> S3CacheError:
    """Translate ``error`` to an error of s3cache; return our own errors unchanged.

    Args:
        sse: the encryption that was asked for.
        via: names the proxy between this machine and the server, if there is one.
    """
    if isinstance(error, S3CacheError):
        return error
    status, code, message, headers = answer_of(error)
    if not status and not code:
        inner = getattr(error, "kwargs", {}).get("error")
        kind, cause, fix = _ROWS[_row_of(error, inner)]
        detail = f"{type(error).__name__}: {error}"
        if inner is not None and str(inner) not in detail:
            detail += f": {inner}"  # the words of aiohttp and the system, which botocore drops
        cause += via
    else:
        kind, cause, fix = _row_of_answer(status, code)
        if code == str(status):  # botocore's, for an answer without a body that it can read
            if status in _PAGES and is_page(headers):
                _, cause, fix = _ROWS["page"]
            code = ""
        if action := _ACTION.search(message):
            fix = f"allow {action[1]}{' on the KMS key' * action[1].startswith('kms:')}"
        elif fix == _ALLOW and sse != "none":
            fix += f"; {_SSE_C if sse == 'C' else _KMS}"
        cause += via if status == 407 else ""
        detail = " ".join(filter(None, (str(status), code, message)))
    return kind(f"{cause} ({_line(detail)}); {fix}", op=op, store=store, key=key)


def _line(detail: str) -> str:
    """Return one short line, without an HTML page or a password of a proxy."""
    return re.sub(r"//\S*@", "//", " ".join(detail.split()))[:300]


def translate_source(error: Exception, source: str, fix: str) -> S3CacheError:
    """Translate ``error`` of a ``source`` of credentials, which ``fix`` may repair."""
    known = translate(error, op="", store="")
    if isinstance(known, CredentialsError) or lacks_memory(error):
        return known
    detail = _line(f"{type(error).__name__}: {error}")
    return CredentialsError(f"{source} has no credentials ({detail}); {fix}")


def refuses_credentials(error: Exception) -> bool:
    """Return whether the server might accept other credentials."""
    # The answer to HEAD has no body, so it is 400 for expired credentials.
    is_unnamed = answer_of(error).code == "400"
    return is_unnamed or isinstance(translate(error, op="", store=""), AccessDeniedError)


def distrusts_server(error: Exception) -> bool:
    """Return whether the certificate of the server is not trusted."""
    names = [kind.__name__ for kind in type(error).__mro__]
    return "SSLError" in names and "CERTIFICATE_VERIFY_FAILED" in str(error)


def _row_of(error: Exception, inner: object) -> str:
    """Return the name of the row for an error without an answer, and the error inside of it."""
    names = [kind.__name__ for kind in type(error).__mro__]
    # The server is not at fault, even if a library wrapped the error.
    if lacks_memory(error):
        return "memory"
    if distrusts_server(error):
        return "certificate"
    if names[0] == "HTTPClientError" and isinstance(inner, (FileNotFoundError, PermissionError)):
        return "bundle"
    if getattr(inner, "status", 0) == 407:
        return "407"
    return next(name for name in names if name in _ROWS)


def _row_of_answer(status: int, code: str) -> tuple[type[StoreError], str, str]:
    # An error under "200 OK" is a failure after the server sent the status.
    other = _ROWS["InternalError" if status >= 500 or status < 300 else "refused"]
    row = _ROWS.get(code) or _ROWS.get(str(status)) or other
    if code not in ("", str(status), *_ROWS) and issubclass(row[0], PermanentError):
        row = row[0], *_ROWS["refused"][1:]  # the server's own words say more than its status
    return row


def is_page(headers: Mapping[str, str]) -> bool:
    """Return whether an answer is a web page, such as that of a login portal.

    Some servers send its type with an empty body, and some objects have it.
    """
    return (
        headers.get("content-type", "").startswith("text/html")
        and headers.get("content-length") != "0"
        and headers.keys().isdisjoint(("etag", "x-amz-request-id"))
    )


def page_error() -> StoreError:
    kind, cause, fix = _ROWS["page"]
    return kind(f"{cause}; {fix}")
