"""The AWS policies, enforced by a real gateway on the real store: what is allowed and what is not.

The gateway takes them as a bucket policy, which is the same statements with a principal each.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3
import pytest

from s3cache.errors import AccessDeniedError
from s3cache.store import Store, open_store

pytestmark = [
    pytest.mark.rgw,
    pytest.mark.skipif(
        "S3CACHE_TEST_RGW_ENDPOINT" not in os.environ, reason="no Ceph RGW (make test-rgw)"
    ),
]

AWS = Path(__file__).parents[2] / "infra" / "aws"
BUCKET = "example-compile-cache"
ROLES = {
    "writer": "s3cache-policy",
    "reader": "s3cache-reader-policy",
    "operator": "s3cache-operator-policy",
}
MULTIPART_BYTES = 5 * 2**20


def create_user(name: str) -> None:
    conf = Path(os.environ["S3CACHE_TEST_RGW_DIR"]) / "ceph.conf"
    keys = ["--access-key", name, "--secret-key", f"{name}-secret"]
    command = ["radosgw-admin", "-c", str(conf), "user", "create", "--uid", name]
    subprocess.run([*command, "--display-name", name, *keys], check=True, capture_output=True)


def bucket_policy() -> str:
    statements = []
    for user, name in ROLES.items():
        for statement in json.loads((AWS / f"{name}.json").read_text())["Statement"]:
            principal = {"AWS": [f"arn:aws:iam:::user/{user}"]}
            sid = f"{statement['Sid']}-{user}"
            statements.append({**statement, "Sid": sid, "Principal": principal})
    return json.dumps({"Version": "2012-10-17", "Statement": statements})


@pytest.fixture(scope="module")
def owner() -> Any:
    """The bucket's owner, with the policy in force and one object inside and outside the prefix."""
    client = boto3.client(
        "s3",
        endpoint_url=os.environ["S3CACHE_TEST_RGW_ENDPOINT"],
        region_name="us-east-1",
        aws_access_key_id=os.environ["S3CACHE_TEST_RGW_ACCESS_KEY"],
        aws_secret_access_key=os.environ["S3CACHE_TEST_RGW_SECRET_KEY"],
    )
    for user in ROLES:
        create_user(user)
    client.create_bucket(Bucket=BUCKET)
    client.put_bucket_policy(Bucket=BUCKET, Policy=bucket_policy())
    for key in ("main/there", "main/there-too", "other/there"):
        client.put_object(Bucket=BUCKET, Key=key, Body=b"bytes")
    yield client
    client.close()


@pytest.fixture
async def open_as(owner: Any) -> Any:
    stores: list[Store] = []

    def open_as(user: str, prefix: str = "main") -> Store:
        store = open_store(
            f"s3://{BUCKET}/{prefix}",
            endpoint_url=os.environ["S3CACHE_TEST_RGW_ENDPOINT"],
            region="us-east-1",
            access_key=user,
            secret_key=f"{user}-secret",
            multipart_bytes=MULTIPART_BYTES,
            part_bytes=MULTIPART_BYTES,
        )
        stores.append(store)
        return store

    yield open_as
    for store in stores:
        await store.aclose()


OpenAs = Callable[..., Store]


@pytest.mark.parametrize("user", ["writer", "operator"])
async def test_the_writer_can_do_all_that_a_job_does(user: str, open_as: OpenAs) -> None:
    store, operator = open_as(user), open_as("operator")
    large = bytes(MULTIPART_BYTES + 1)
    await store.put("small", b"small")
    await store.put("large", large)
    await store.put("new", b"new", mode="create")
    assert await store.get("small") == b"small"
    assert await store.get("large") == large
    assert await store.get_range("small", 1, 2) == b"ma"
    assert {info.key async for info in store.list()} >= {"small", "large", "new", "there"}
    for key in ("small", "large", "new"):
        if user == "writer":
            with pytest.raises(AccessDeniedError):
                await store.delete(key)
        await operator.delete(key)
        assert await store.head(key) is None


async def test_the_reader_can_read_and_list(open_as: OpenAs) -> None:
    store = open_as("reader")
    assert await store.get("there") == b"bytes"
    assert {info.key async for info in store.list("there")} == {"there", "there-too"}


@pytest.mark.parametrize("user", ROLES)
async def test_an_absent_object_is_a_miss_and_not_a_refusal(user: str, open_as: OpenAs) -> None:
    store = open_as(user)
    assert await store.get("absent") is None
    assert await store.head("absent") is None


async def test_the_reader_cannot_change_anything(open_as: OpenAs, owner: Any) -> None:
    store = open_as("reader")
    with pytest.raises(AccessDeniedError):
        await store.put("there", b"other bytes")
    with pytest.raises(AccessDeniedError):
        await store.delete("there")
    assert owner.get_object(Bucket=BUCKET, Key="main/there")["Body"].read() == b"bytes"


@pytest.mark.parametrize("user", ROLES)
async def test_another_prefix_is_out_of_reach(user: str, open_as: OpenAs, owner: Any) -> None:
    store = open_as(user, prefix="other")
    with pytest.raises(AccessDeniedError):
        await store.get("there")
    with pytest.raises(AccessDeniedError):
        await store.put("there", b"other bytes")
    with pytest.raises(AccessDeniedError):
        await store.delete("there")
    with pytest.raises(AccessDeniedError):
        _ = [info async for info in store.list()]
    assert owner.get_object(Bucket=BUCKET, Key="other/there")["Body"].read() == b"bytes"


def test_the_lifecycle_rules_are_accepted(owner: Any) -> None:
    rules = json.loads((AWS / "lifecycle.json").read_text())
    owner.put_bucket_lifecycle_configuration(Bucket=BUCKET, LifecycleConfiguration=rules)
    accepted = owner.get_bucket_lifecycle_configuration(Bucket=BUCKET)["Rules"]
    wanted = sorted(rules["Rules"], key=lambda rule: rule["ID"])
    got = sorted(accepted, key=lambda rule: rule["ID"])
    assert [
        {name: rule[name] for name in like} for rule, like in zip(got, wanted, strict=True)
    ] == (wanted)
