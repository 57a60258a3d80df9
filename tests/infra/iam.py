"""IAM's decision about a request, from the policies that were deployed.

moto stores policies but enforces little of them: no conditions and no resource-based policies. So
this module evaluates them for one account, as AWS documents it
(https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_evaluation-logic.html). An
operator or element that it does not know is an error, not a match.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from urllib.parse import parse_qsl, unquote, urlsplit

from tests.support.scripted import Request as Sent

Policy: TypeAlias = Mapping[str, Any]

_ELEMENTS = {"Sid", "Effect", "Principal", "Action", "NotAction", "Resource", "Condition"}


@dataclass(frozen=True)
class Request:
    """A requested action, its principal and its resource.

    Attributes:
        context: values of condition keys; a missing key has no value in the request.
    """

    principal: str
    action: str
    resource: str
    context: Mapping[str, str] = field(default_factory=dict)


def is_allowed(
    request: Request, identity: Iterable[Policy] = (), resource: Iterable[Policy] = ()
) -> bool:
    """Return whether a statement allows the request and none denies it.

    Args:
        identity: policies of the principal.
        resource: policies of the resource.
    """
    effects = {
        statement["Effect"]
        for policies, has_principal in ((identity, False), (resource, True))
        for policy in policies
        for statement in policy["Statement"]
        if _concerns(statement, request, has_principal=has_principal)
    }
    assert effects <= {"Allow", "Deny"}
    return effects == {"Allow"}


def _concerns(statement: Policy, request: Request, *, has_principal: bool) -> bool:
    assert statement.keys() <= _ELEMENTS, f"not evaluated here: {statement.keys() - _ELEMENTS}"
    assert ("Principal" in statement) == has_principal
    # A role's trust policy names no resource: it is about the role.
    resources = statement.get("Resource", request.resource)
    assert ("Action" in statement) != ("NotAction" in statement)
    named = _list(statement["Action" if "Action" in statement else "NotAction"])
    is_named = any(_like(text.lower(), request.action.lower()) for text in named)
    return (
        (not has_principal or _is_principal(statement["Principal"], request.principal))
        and is_named == ("Action" in statement)
        and any(_like(text, request.resource) for text in _list(resources))
        and all(
            _test(operator, request.context.get(key), _list(values))
            for operator, keys in statement.get("Condition", {}).items()
            for key, values in keys.items()
        )
    )


def _is_principal(named: Any, principal: str) -> bool:
    return named == "*" or any(principal in _list(each) for each in named.values())


_OPERATORS: dict[str, Callable[[str, str], bool]] = {
    "ArnEquals": lambda wanted, value: _like(wanted, value),
    "Bool": lambda wanted, value: wanted.lower() == value.lower(),
    "StringEquals": lambda wanted, value: wanted == value,
    "StringLike": lambda wanted, value: _like(wanted, value),
}


def _test(operator: str, value: str | None, wanted: list[str]) -> bool:
    if operator == "Null":
        return [str(value is None).lower()] == wanted
    name = operator.removesuffix("IfExists")
    negated = re.fullmatch("(Arn|String)Not(Equals|Like)", name)
    compare = _OPERATORS["".join(negated.groups()) if negated else name]
    if value is None:
        return negated is not None or name != operator
    return any(compare(each, value) for each in wanted) != (negated is not None)


def _like(pattern: str, text: str) -> bool:
    parts = (".*" if part == "*" else "." if part == "?" else re.escape(part) for part in pattern)
    return re.fullmatch("".join(parts), text, re.DOTALL) is not None


def _list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


# -- the requests that S3 sends to IAM


# https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazons3.html
_OF_BUCKETS = {
    ("GET", ""): "ListBucket",
    ("GET", "versions"): "ListBucketVersions",
    ("GET", "policy"): "GetBucketPolicy",
    ("PUT", "policy"): "PutBucketPolicy",
    ("PUT", "versioning"): "PutBucketVersioning",
    ("PUT", "lifecycle"): "PutLifecycleConfiguration",
    ("DELETE", ""): "DeleteBucket",
}
_OF_OBJECTS = {
    ("GET", ""): "GetObject",
    ("HEAD", ""): "GetObject",
    ("GET", "versionId"): "GetObjectVersion",
    ("PUT", ""): "PutObject",
    ("PUT", "uploadId"): "PutObject",
    ("POST", "uploads"): "PutObject",
    ("POST", "uploadId"): "PutObject",
    ("PUT", "acl"): "PutObjectAcl",
    ("PUT", "tagging"): "PutObjectTagging",
    ("DELETE", ""): "DeleteObject",
    ("DELETE", "versionId"): "DeleteObjectVersion",
    ("DELETE", "uploadId"): "AbortMultipartUpload",
}
_SUBRESOURCES = {name for _, name in {**_OF_BUCKETS, **_OF_OBJECTS}} - {""}


def s3_requests(request: Sent, *, principal: str, is_secure: bool) -> Iterator[Request]:
    """Yield the IAM requests for an HTTP request with the bucket in its path; all must pass."""
    path, query = (
        urlsplit(request.target).path,
        dict(parse_qsl(urlsplit(request.target).query, True)),
    )
    bucket, _, key = unquote(path).lstrip("/").partition("/")
    sent = {name.lower(): value for name, value in request.sent.items()}
    method = request.method
    (subresource,) = _SUBRESOURCES & query.keys() or {""}
    context = {"aws:PrincipalArn": principal, "aws:SecureTransport": str(is_secure).lower()}
    if "prefix" in query:
        context["s3:prefix"] = query["prefix"]
    if "if-none-match" in sent:
        context["s3:if-none-match"] = sent["if-none-match"]
    action = (_OF_OBJECTS if key else _OF_BUCKETS)[method, subresource]
    if action == "PutObject":
        begins_or_sends_a_part = (method, subresource) in (("POST", "uploads"), ("PUT", "uploadId"))
        context["s3:ObjectCreationOperation"] = str(not begins_or_sends_a_part).lower()
    arn = f"arn:aws:s3:::{bucket}"
    yield Request(principal, f"s3:{action}", f"{arn}/{key}" if key else arn, context)
    if source := sent.get("x-amz-copy-source"):
        yield Request(
            principal, "s3:GetObject", f"arn:aws:s3:::{unquote(source).lstrip('/')}", context
        )
