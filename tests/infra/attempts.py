"""Attempts on a bucket, and the roles that may make them: a table for tests of every server."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

_COUNT = itertools.count()


@lru_cache
def client(
    endpoint: str, access_key: str, secret_key: str = "secret", service: str = "s3", **options: Any
) -> Any:
    """Return a client with the settings that s3cache gives botocore, and that Ceph 16 needs."""
    return boto3.client(
        service,
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
        config=Config(
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            retries={"total_max_attempts": 1},
            s3={"addressing_style": "path"},
        ),
        **options,
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


#: The method of a client, and a function from the bucket and a prefix to its arguments.
Attempt = tuple[str, Callable[[Bucket, str], dict[str, Any]]]
_ON_OBJECTS: dict[str, Attempt] = {
    "read {}": ("get_object", Bucket.there),
    "look at {}": ("head_object", Bucket.there),
    "list {}": ("list_objects_v2", lambda b, p: {"Bucket": b.name, "Prefix": f"{p}/"}),
    "add to {}": ("put_object", lambda b, p: {"Body": b"bytes", "IfNoneMatch": "*", **b.new(p)}),
    "overwrite {}": ("put_object", lambda b, p: {"Body": b"other", **b.fresh(p)}),
    "begin parts in {}": ("create_multipart_upload", Bucket.new),
    "send a part to {}": (
        "upload_part", lambda b, p: {"PartNumber": 1, "Body": b"bytes", **b.begun(p)},
    ),
    "add parts to {}": (
        "complete_multipart_upload", lambda b, p: {"IfNoneMatch": "*", **b.sent(p)},
    ),
    "overwrite {} with parts": ("complete_multipart_upload", Bucket.sent),
    "abort parts in {}": ("abort_multipart_upload", Bucket.begun),
    "copy to {}": ("copy_object", lambda b, p: {"CopySource": b.there("main"), **b.new(p)}),
    "delete from {}": ("delete_object", Bucket.fresh),
    "read a version in {}": ("get_object", Bucket.version),
    "delete a version in {}": ("delete_object", Bucket.version),
}  # fmt: skip
_NO_POLICY = json.dumps({"Version": "2012-10-17", "Statement": []})
_ON_THE_BUCKET: dict[str, tuple[str, dict[str, Any]]] = {
    "list all": ("list_objects_v2", {}),
    "list versions": ("list_object_versions", {}),
    "make an object public": ("put_object_acl", {"ACL": "public-read", "Key": "main/there"}),
    "read the policy": ("get_bucket_policy", {}),
    "change the policy": ("put_bucket_policy", {"Policy": _NO_POLICY}),
    "suspend versions": (
        "put_bucket_versioning", {"VersioningConfiguration": {"Status": "Suspended"}},
    ),
    "change the lifecycle": (
        "put_bucket_lifecycle_configuration", {"LifecycleConfiguration": {"Rules": []}},
    ),
    "delete the bucket": ("delete_bucket", {}),
}  # fmt: skip
#: The method and the arguments of each attempt. No role has rights under other/.
ATTEMPTS: dict[str, tuple[str, Callable[[Bucket], dict[str, Any]]]] = {
    **{
        name.format(prefix): (method, lambda b, p=prefix, of=of: of(b, p))  # type: ignore[misc]
        for prefix in Bucket.PREFIXES
        for name, (method, of) in _ON_OBJECTS.items()
    },
    **{
        name: (method, lambda bucket, more=more: {"Bucket": bucket.name, **more})  # type: ignore[misc]
        for name, (method, more) in _ON_THE_BUCKET.items()
    },
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


def wrong_answers(
    role: str, client: Any, bucket: Bucket, but: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """Return the attempts that a server allows or refuses to a role contrary to :data:`MAY`.

    Args:
        but: the roles that may make an attempt, where a server differs from AWS.
    """
    may = {**MAY, **but}
    return [
        attempt
        for attempt in ATTEMPTS
        if is_refused(attempt, client, bucket) == (role in may.get(attempt, "").split())
    ]


def is_refused(attempt: str, client: Any, bucket: Bucket) -> bool:
    """Return whether the server denies the attempt; any other error fails the test."""
    try:
        method, arguments = ATTEMPTS[attempt]
        getattr(client, method)(**arguments(bucket))
    except ClientError as error:
        status = error.response["ResponseMetadata"]["HTTPStatusCode"]
        if status != 403:
            pytest.fail(f"{attempt}: {error}")
        return True
    return False
