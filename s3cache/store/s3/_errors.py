"""What botocore, aiohttp and the socket raise, as s3cache's errors: two tables and one function.

botocore is not imported here: exceptions are told apart by the names of their classes, so that
this module costs nothing before a client exists.
"""

from __future__ import annotations

from typing import Any

from s3cache.errors import (
    AccessDeniedError,
    MissingContainerError,
    NoSpaceError,
    PermanentError,
    PreconditionError,
    S3CacheError,
    StoreError,
    TransientError,
)

__all__ = [
    "error_code",
    "error_status",
    "is_absent",
    "no_answer_of_s3",
    "refuses_condition",
    "translate",
]

_CREDENTIALS = (
    "check the environment (AWS_ACCESS_KEY_ID, AWS_PROFILE), the profile or the role in use; "
    "'aws sts get-caller-identity' shows it"
)
_RENEW = "get new ones: 'aws sso login', or the role or secret this machine takes them from"
_REGION = "set region=... to the bucket's own, or endpoint_url=... to the server that holds it"
_ALLOW = (
    "allow s3:GetObject, s3:PutObject and s3:ListBucket on the bucket and prefix "
    "(without s3:ListBucket, S3 answers 403 for an absent object instead of 404)"
)
_ALLOW_DELETE = "allow s3:DeleteObject to whoever looks after the bucket; jobs need no such right"
_PASSING = "it should pass by itself; try again"
_DAMAGED = "the bytes were damaged or cut short on the way; try again"
_BUSY = "the server asks for fewer requests; try again later"

# By the server's error code. AWS's: https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
# XMinio*: https://github.com/minio/minio/blob/master/cmd/api-errors.go
_BY_CODE: dict[str, tuple[type[StoreError], str, str]] = {
    # who is asking
    "InvalidAccessKeyId": (AccessDeniedError, "the access key is not known here", _CREDENTIALS),
    "SignatureDoesNotMatch": (AccessDeniedError, "the secret key is wrong", _CREDENTIALS),
    "ExpiredToken": (AccessDeniedError, "the credentials have expired", _RENEW),
    "ExpiredTokenException": (AccessDeniedError, "the credentials have expired", _RENEW),
    "TokenRefreshRequired": (AccessDeniedError, "the credentials have expired", _RENEW),
    "InvalidToken": (AccessDeniedError, "the session token is not valid", _RENEW),
    "InvalidIdentityToken": (AccessDeniedError, "the web identity token is refused", _RENEW),
    "InvalidClientTokenId": (AccessDeniedError, "the access key is not known", _CREDENTIALS),
    "AccessDenied": (AccessDeniedError, "these credentials may not do this", _ALLOW),
    "AllAccessDisabled": (AccessDeniedError, "all access is disabled", "ask the bucket's owner"),
    "AccountProblem": (AccessDeniedError, "the account has a problem", "ask the provider"),
    "RequestTimeTooSkewed": (
        PermanentError,
        "this machine's clock is more than 15 minutes off",
        "set it (NTP, chrony, 'timedatectl set-ntp true')",
    ),
    # where
    "NoSuchBucket": (
        MissingContainerError,
        "the bucket does not exist",
        "check its name and endpoint_url, or create it: s3cache never does",
    ),
    "PermanentRedirect": (PermanentError, "the bucket is in another region", _REGION),
    "TemporaryRedirect": (PermanentError, "the bucket is in another region", _REGION),
    "AuthorizationHeaderMalformed": (PermanentError, "the region is wrong", _REGION),
    "IllegalLocationConstraintException": (PermanentError, "the region is wrong", _REGION),
    "InvalidBucketName": (
        PermanentError,
        "the bucket's name is not legal here",
        "check the URL, and addressing_style=path if the server knows no bucket host names",
    ),
    "InvalidObjectState": (
        PermanentError,
        "the object is in an archive",
        "use a storage class that can be read at once, and exempt the prefix from archiving",
    ),
    # someone else was first
    "PreconditionFailed": (PreconditionError, "an object is already there", "read it"),
    "ConditionalRequestConflict": (TransientError, "another write is under way", _PASSING),
    "OperationAborted": (TransientError, "another operation is under way", _PASSING),
    "NoSuchUpload": (TransientError, "the upload was aborted by someone else", _PASSING),
    # full
    "QuotaExceeded": (NoSpaceError, "the quota is used up", "raise it or delete objects"),
    "InsufficientStorage": (NoSpaceError, "the server is full", "add disks or delete objects"),
    "XMinioStorageFull": (NoSpaceError, "the server is full", "add disks or delete objects"),
    "XMinioAdminBucketQuotaExceeded": (
        NoSpaceError,
        "the bucket's quota is used up",
        "raise it or delete objects",
    ),
    # bytes
    "BadDigest": (TransientError, "the digest does not match", _DAMAGED),
    "XAmzContentSHA256Mismatch": (TransientError, "the digest does not match", _DAMAGED),
    "XAmzContentChecksumMismatch": (TransientError, "the checksum does not match", _DAMAGED),
    "IncompleteBody": (TransientError, "the body is too short", _DAMAGED),
    "RequestTimeout": (TransientError, "the server waited too long for the request", _PASSING),
    "EntityTooLarge": (
        PermanentError,
        "the object is too large for this server",
        "one request holds 5 GiB at most, and some servers allow less",
    ),
    # load
    "SlowDown": (TransientError, "too many requests", _BUSY),
    "SlowDownRead": (TransientError, "too many requests", _BUSY),
    "SlowDownWrite": (TransientError, "too many requests", _BUSY),
    "Throttling": (TransientError, "too many requests", _BUSY),
    "ThrottlingException": (TransientError, "too many requests", _BUSY),
    "RequestThrottled": (TransientError, "too many requests", _BUSY),
    "RequestLimitExceeded": (TransientError, "too many requests", _BUSY),
    "TooManyRequests": (TransientError, "too many requests", _BUSY),
    "BandwidthLimitExceeded": (TransientError, "too much traffic", _BUSY),
    "InternalError": (TransientError, "the server failed", _PASSING),
    "ServiceUnavailable": (TransientError, "the server is not available", _PASSING),
    "XMinioServerNotInitialized": (TransientError, "the server is starting", _PASSING),
    "NotImplemented": (
        PermanentError,
        "the server does not know this request",
        "if it was a conditional write, set conditional_create=check",
    ),
}

_ELSEWHERE = (
    PermanentError,
    "the server sends us elsewhere, where credentials must not follow",
    "set endpoint_url to the server that holds the bucket, or region=... to the bucket's own",
)

# By status, for codes not above and for answers with no body (all those to HEAD).
_BY_STATUS: dict[int, tuple[type[StoreError], str, str]] = {
    **dict.fromkeys((301, 302, 303, 307, 308), _ELSEWHERE),
    400: (
        PermanentError,
        "the server refuses the request",
        "expired credentials and a wrong region look like this where the answer has no body",
    ),
    401: (AccessDeniedError, "the server does not know these credentials", _CREDENTIALS),
    403: _BY_CODE["AccessDenied"],
    404: (
        PermanentError,
        "the server knows no such address",
        "check that endpoint_url is an S3 server, and addressing_style",
    ),
    408: _BY_CODE["RequestTimeout"],
    409: _BY_CODE["ConditionalRequestConflict"],
    412: _BY_CODE["PreconditionFailed"],
    413: _BY_CODE["EntityTooLarge"],
    429: _BY_CODE["SlowDown"],
    501: _BY_CODE["NotImplemented"],
    507: _BY_CODE["InsufficientStorage"],
}

# By class name, looked up along the exception's bases: what was raised before there was an answer.
_BY_CLASS: dict[str, tuple[type[StoreError], str, str]] = {
    "NoCredentialsError": (AccessDeniedError, "no credentials were found", _CREDENTIALS),
    "PartialCredentialsError": (AccessDeniedError, "half of a key pair is missing", _CREDENTIALS),
    "CredentialRetrievalError": (AccessDeniedError, "getting credentials failed", _CREDENTIALS),
    "NoAuthTokenError": (AccessDeniedError, "there is no SSO token", "run 'aws sso login'"),
    "TokenRetrievalError": (
        AccessDeniedError,
        "the SSO token is not usable",
        "run 'aws sso login'",
    ),
    "SSOError": (AccessDeniedError, "the SSO session is not usable", "run 'aws sso login'"),
    "ProfileNotFound": (
        AccessDeniedError,
        "there is no such profile",
        "list them with 'aws configure list-profiles'; check profile=... and AWS_PROFILE",
    ),
    "ConfigParseError": (PermanentError, "the AWS configuration is not readable", "correct it"),
    "ConfigNotFound": (PermanentError, "the AWS configuration is missing", "check AWS_CONFIG_FILE"),
    "NoRegionError": (PermanentError, "no region is set", "set region=... or AWS_DEFAULT_REGION"),
    "InvalidRegionError": (PermanentError, "the region is no name", "check region=..."),
    "InvalidProxiesConfigError": (PermanentError, "the proxy is not usable", "check proxy=..."),
    "ProxyConnectionError": (TransientError, "the proxy does not answer", "check proxy=..."),
    "SSLError": (TransientError, "the TLS handshake failed", _PASSING),
    "ConnectTimeoutError": (TransientError, "connecting took too long", _PASSING),
    "ReadTimeoutError": (TransientError, "the answer took too long", _PASSING),
    "EndpointConnectionError": (
        TransientError,
        "cannot connect",
        "check endpoint_url, DNS, firewall and that the server runs",
    ),
    "HTTPClientError": (TransientError, "the connection broke", _PASSING),
    "IncompleteReadError": (TransientError, "the body is too short", _DAMAGED),
    "ClientPayloadError": (TransientError, "the body is too short", _DAMAGED),
    "ChecksumError": (TransientError, "the checksum does not match", _DAMAGED),
    "FlexibleChecksumError": (TransientError, "the checksum does not match", _DAMAGED),
    "ResponseParserError": (TransientError, "the answer is not S3's", "check endpoint_url"),
    "MetadataRetrievalError": (TransientError, "the metadata service does not answer", _PASSING),
    "ParamValidationError": (PermanentError, "a parameter is not legal", "see the cause"),
    "ClientError": (TransientError, "the connection broke", _PASSING),  # aiohttp's
    "TimeoutError": (TransientError, "it took too long", _PASSING),
    "OSError": (TransientError, "the connection broke", _PASSING),
    "BotoCoreError": (PermanentError, "the S3 client refuses", "see the cause"),
}

_NO_MEMORY: tuple[type[StoreError], str, str] = (
    PermanentError,
    "this process has no memory left for it",
    "give it more",
)

_CERTIFICATE = (
    PermanentError,
    "the server's certificate is not trusted",
    "set ca_bundle=/path/to/ca.pem or AWS_CA_BUNDLE",
)

# Anything else is a defect, ours or a library's. Trying again would only make it slow, and the
# caller of a cache must not see it raw.
_UNEXPECTED = (PermanentError, "unexpected", "please report it with its traceback")


def translate(error: Exception, *, op: str, store: str, key: str = "") -> S3CacheError:
    """``error`` as one of s3cache's; those that already are come back as they are.

    ``asyncio.CancelledError`` is no ``Exception`` and is never passed here.
    """
    if isinstance(error, S3CacheError):
        return error
    answer = _answer(error)
    kind, cause, fix = _NO_MEMORY
    if _is_out_of_memory(error):  # whoever had none, in between: it says nothing of the server
        detail = type(error).__name__
    elif answer is None:
        kind, cause, fix = _by_class(error)
        detail = f"{type(error).__name__}: {error}"
    else:
        code, status = error_code(error), error_status(error)
        kind, cause, fix = _by_code(code, status)
        if op == "delete" and fix is _ALLOW:
            fix = _ALLOW_DELETE
        said = str(answer.get("Error", {}).get("Message", ""))
        detail = f"{status} {code} {said}".strip() + _region_hint(answer)
    # one line, and no page of HTML from a proxy
    detail = " ".join(detail.split())[:300]
    return kind(f"{cause} ({detail}); {fix}", op=op, store=store, key=key)


def no_answer_of_s3(what: str) -> TransientError:
    """The answer is none of an S3 server: it comes from a proxy, or a portal, and may pass."""
    return TransientError(
        f"the answer {what}; check that endpoint_url is an S3 server, and what stands between (a "
        "proxy, a portal that wants a login)"
    )


def error_code(error: Exception) -> str:
    """The server's error code, the status as text where the answer had no body, or ``""``."""
    return str((_answer(error) or {}).get("Error", {}).get("Code", ""))


def error_status(error: Exception) -> int:
    """The HTTP status, or 0 where there was no answer."""
    return int((_answer(error) or {}).get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def is_absent(error: Exception) -> bool:
    """Whether the server says that the object is not there.

    The answer to HEAD has no body, so that a bucket that is not there looks the same.
    """
    return error_code(error) in ("NoSuchKey", "NoSuchVersion", "404")


def refuses_condition(error: Exception) -> bool:
    """Whether the server says that it does not know ``If-None-Match`` on a write."""
    if error_status(error) == 501 or error_code(error) == "NotImplemented":
        return True
    said = str((_answer(error) or {}).get("Error", {}).get("Message", "")).lower()
    return error_status(error) == 400 and "if-none-match" in said


def _answer(error: Exception) -> dict[str, Any] | None:
    # botocore's ClientError carries the parsed answer; aiohttp has a ClientError without
    answer = getattr(error, "response", None)
    return answer if isinstance(answer, dict) else None


def _by_code(code: str, status: int) -> tuple[type[StoreError], str, str]:
    if (row := _BY_CODE.get(code) or _BY_STATUS.get(status)) is not None:
        return row
    if status >= 500 or status < 300:  # an error under "200 OK" is a failure found too late
        return _BY_CODE["InternalError"]
    return PermanentError, "the server refuses the request", "see its message"


def _by_class(error: Exception) -> tuple[type[StoreError], str, str]:
    names = [kind.__name__ for kind in type(error).__mro__]
    if "SSLError" in names and "CERTIFICATE_VERIFY_FAILED" in str(error):
        return _CERTIFICATE
    return next((_BY_CLASS[name] for name in names if name in _BY_CLASS), _UNEXPECTED)


def _is_out_of_memory(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, MemoryError):
        error = error.__cause__ or error.__context__
    return error is not None


def _region_hint(answer: dict[str, Any]) -> str:
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    region = headers.get("x-amz-bucket-region") or answer.get("Error", {}).get("Region")
    return f"; the bucket's region is {region}" if region else ""
