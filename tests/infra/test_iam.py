"""What decides about requests in these tests decides as AWS says that IAM does."""

from __future__ import annotations

from typing import Any

import pytest

from tests.infra.iam import Request, is_allowed, s3_requests

WHO = "arn:aws:iam::123456789012:role/job"
OBJECT = "arn:aws:s3:::bucket/main/x"


def policy(effect: str = "Allow", **elements: Any) -> dict[str, Any]:
    statement = {"Effect": effect, "Action": "s3:GetObject", "Resource": OBJECT, **elements}
    return {"Version": "2012-10-17", "Statement": [statement]}


def decides(*identity: dict[str, Any], resource: Any = (), **context: str) -> bool:
    return is_allowed(Request(WHO, "s3:GetObject", OBJECT, context), identity, resource)


def test_either_policy_allows_any_denies_and_nothing_is_allowed_by_default() -> None:
    of_bucket = policy(Principal={"AWS": [WHO]})
    assert not decides()
    assert not decides(policy(Action="s3:PutObject"))
    assert decides(policy())
    assert decides(resource=[of_bucket])
    assert not decides(resource=[policy(Principal={"AWS": ["arn:aws:iam::123456789012:role/b"]})])
    assert not decides(policy(), resource=[policy("Deny", Principal="*")])
    assert not decides(policy(), policy("Deny"), resource=[of_bucket])


@pytest.mark.parametrize(
    ("below", "matches"),
    [("main/*", True), ("*", True), ("main/?", True), ("main/", False), ("ma[i]n/x", False)],
)
def test_wildcards_are_stars_and_question_marks(below: str, matches: bool) -> None:
    assert decides(policy(Resource=f"arn:aws:s3:::bucket/{below}")) == matches


# https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_policies_elements_condition_operators.html
@pytest.mark.parametrize(
    ("operator", "wanted", "of_equal", "of_other", "of_absent"),
    [
        ("StringEquals", "value", True, False, False),
        ("StringEqualsIfExists", "value", True, False, True),
        ("StringNotEquals", "value", False, True, True),
        ("StringLike", "val*", True, False, False),
        ("StringLikeIfExists", ["x", "val*"], True, False, True),
        ("ArnNotEquals", "value", False, True, True),
        ("Bool", "value", True, False, False),
        ("BoolIfExists", "value", True, False, True),
        ("Null", "true", False, False, True),
        ("Null", "false", True, True, False),
    ],
)
def test_conditions(
    operator: str, wanted: Any, of_equal: bool, of_other: bool, of_absent: bool
) -> None:
    asks = policy(Condition={operator: {"key": wanted}})
    assert decides(asks, key="value") == of_equal
    assert decides(asks, key="other") == of_other
    assert decides(asks) == of_absent


def test_what_is_not_evaluated_is_an_error() -> None:
    with pytest.raises(KeyError):
        decides(policy(Condition={"DateLessThan": {"key": "2026-01-01"}}), key="2025-01-01")
    with pytest.raises(AssertionError, match="NotResource"):
        decides(policy(NotResource=OBJECT))


@pytest.mark.parametrize(
    ("method", "target", "action", "creates"),
    [
        ("GET", "/bucket/main/x?versionId=1", "GetObjectVersion", None),
        ("GET", "/bucket?list-type=2&prefix=main%2F", "ListBucket", None),
        ("PUT", "/bucket/main/x", "PutObject", "true"),
        ("PUT", "/bucket/main/x?partNumber=1&uploadId=u", "PutObject", "false"),
    ],
)
def test_a_request_asks_for_one_right(
    method: str, target: str, action: str, creates: str | None
) -> None:
    (asked,) = s3_requests(method, target, {}, principal=WHO, is_secure=True)
    assert asked.action == f"s3:{action}"
    assert asked.resource == ("arn:aws:s3:::bucket" if "list" in target else OBJECT)
    assert asked.context.get("s3:ObjectCreationOperation") == creates
    assert asked.context.get("s3:prefix") == ("main/" if "list" in target else None)


def test_a_copy_asks_to_read_its_source_too() -> None:
    headers = {"x-amz-copy-source": "bucket/pulls/y"}
    asked = s3_requests("PUT", "/bucket/main/x", headers, principal=WHO, is_secure=True)
    assert [one.action for one in asked] == ["s3:PutObject", "s3:GetObject"]
