"""Attempts on a bucket, and the roles that may make them: a table for tests of every server."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
from _pytest.mark import ParameterSet
from botocore.config import Config
from botocore.exceptions import ClientError

from infra.policies import ROLES
from tests.support.marks import slow

_COUNT = itertools.count()

# The settings that s3cache gives botocore, and that Ceph 16 needs.
config = Config(
    request_checksum_calculation="when_required",
    response_checksum_validation="when_required",
    retries={"total_max_attempts": 1},
    s3={"addressing_style": "path"},
)


@dataclass(frozen=True)
class Bucket:
    """A versioned bucket with an object under each prefix, and its owner's client."""

    name: str
    owner: Any

    PREFIXES = ("main", "pulls", "other")

    def fill(self) -> None:
        for prefix in self.PREFIXES:
            self.owner.put_object(Bucket=self.name, Key=f"{prefix}/there", Body=b"bytes")

    # Each of these methods returns the parameters of a request.

    def new(self, prefix: str) -> dict[str, str]:
        return {"Bucket": self.name, "Key": f"{prefix}/new-{next(_COUNT)}"}

    def there(self, prefix: str) -> dict[str, str]:
        return {"Bucket": self.name, "Key": f"{prefix}/there"}

    def fresh(self, prefix: str) -> dict[str, str]:
        target = self.new(prefix)
        self.owner.put_object(Body=b"bytes", **target)
        return target

    def version(self, prefix: str) -> dict[str, str]:
        target = self.fresh(prefix)
        version = self.owner.put_object(Body=b"more", **target)["VersionId"]
        return {**target, "VersionId": version}

    def begun(self, prefix: str) -> dict[str, str]:
        target = self.new(prefix)
        return {**target, "UploadId": self.owner.create_multipart_upload(**target)["UploadId"]}

    def sent(self, prefix: str) -> dict[str, Any]:
        upload = self.begun(prefix)
        part = self.owner.upload_part(PartNumber=1, Body=b"bytes", **upload)
        parts = [{"PartNumber": 1, "ETag": part["ETag"]}]
        return {**upload, "MultipartUpload": {"Parts": parts}}


Attempt = Callable[[Any, Bucket], object]


def _of_prefix(p: str) -> dict[str, Attempt]:
    return {
        f"read {p}": lambda client, b: client.get_object(**b.there(p)),
        f"look at {p}": lambda client, b: client.head_object(**b.there(p)),
        f"list {p}": lambda client, b: client.list_objects_v2(Bucket=b.name, Prefix=f"{p}/"),
        f"add to {p}": lambda client, b: client.put_object(
            Body=b"bytes", IfNoneMatch="*", **b.new(p)
        ),
        f"overwrite {p}": lambda client, b: client.put_object(Body=b"other", **b.fresh(p)),
        f"begin parts in {p}": lambda client, b: client.create_multipart_upload(**b.new(p)),
        f"send a part to {p}": lambda client, b: client.upload_part(
            PartNumber=1, Body=b"bytes", **b.begun(p)
        ),
        f"add parts to {p}": lambda client, b: client.complete_multipart_upload(
            IfNoneMatch="*", **b.sent(p)
        ),
        f"overwrite {p} with parts": lambda client, b: client.complete_multipart_upload(
            **b.sent(p)
        ),
        f"abort parts in {p}": lambda client, b: client.abort_multipart_upload(**b.begun(p)),
        f"copy to {p}": lambda client, b: client.copy_object(
            CopySource=b.there("main"), **b.new(p)
        ),
        f"delete from {p}": lambda client, b: client.delete_object(**b.fresh(p)),
        f"read a version in {p}": lambda client, b: client.get_object(**b.version(p)),
        f"delete a version in {p}": lambda client, b: client.delete_object(**b.version(p)),
    }


#: Attempts by name. No role has rights under other/.
ATTEMPTS: dict[str, Attempt] = {
    **_of_prefix("main"),
    **_of_prefix("pulls"),
    **_of_prefix("other"),
    "list all": lambda client, b: client.list_objects_v2(Bucket=b.name),
    "list versions": lambda client, b: client.list_object_versions(Bucket=b.name),
    "make an object public": lambda client, b: client.put_object_acl(
        ACL="public-read", **b.there("main")
    ),
    "read the policy": lambda client, b: client.get_bucket_policy(Bucket=b.name),
    "change the policy": lambda client, b: client.put_bucket_policy(
        Bucket=b.name, Policy=json.dumps({"Version": "2012-10-17", "Statement": []})
    ),
    "suspend versions": lambda client, b: client.put_bucket_versioning(
        Bucket=b.name, VersioningConfiguration={"Status": "Suspended"}
    ),
    "change the lifecycle": lambda client, b: client.put_bucket_lifecycle_configuration(
        Bucket=b.name, LifecycleConfiguration={"Rules": []}
    ),
    "delete the bucket": lambda client, b: client.delete_bucket(Bucket=b.name),
}

_ALL_ROLES = "main pulls reader operator"


def _rights(prefix: str, readers: str, writers: str) -> dict[str, str]:
    reading = ("read", "look at", "list")
    adding = ("add to", "begin parts in", "send a part to", "add parts to", "abort parts in")
    changing = ("overwrite", "copy to", "delete from", "read a version in", "delete a version in")
    return {
        **{f"{verb} {prefix}": readers for verb in reading},
        **{f"{verb} {prefix}": writers for verb in adding},
        **{f"{verb} {prefix}": "operator" for verb in changing},
        f"overwrite {prefix} with parts": "operator",
    }


#: The roles that may make an attempt; no role may make an attempt that is not here.
MAY = {
    **_rights("main", readers=_ALL_ROLES, writers="main operator"),
    **_rights("pulls", readers="pulls operator", writers="pulls operator"),
    # The names, not the bytes: S3 checks this right, without a prefix, to tell absent from
    # forbidden.
    "list all": _ALL_ROLES,
    "list versions": "operator",
}


@dataclass(frozen=True)
class Case:
    role: str
    attempt: str
    may: bool


def cases(but: Mapping[str, str] = MappingProxyType({})) -> list[ParameterSet]:
    """Return every role with every attempt, as parameters of a test.

    Args:
        but: the roles that may make an attempt, where a server differs from AWS.
    """
    may = {**MAY, **but}
    return [
        pytest.param(
            Case(role.name, attempt, role.name in may.get(attempt, "").split()),
            id=f"{role.name}-{attempt}",
            marks=[slow] if attempt.endswith(" other") and attempt != "add to other" else [],
        )
        for attempt in ATTEMPTS
        for role in ROLES
    ]


def is_refused(attempt: str, client: Any, bucket: Bucket) -> bool:
    """Return whether the server denies the attempt; any other error fails the test."""
    try:
        ATTEMPTS[attempt](client, bucket)
    except ClientError as error:
        status = error.response["ResponseMetadata"]["HTTPStatusCode"]
        if status != 403:
            pytest.fail(f"{attempt}: {error}")
        return True
    return False
