"""A real gateway enforces what ``deploy.py`` sets up: every role makes every attempt.

Ceph 16 honours prefixes, users, versions and TLS. It has no condition for writes that overwrite,
and does not honour ``If-None-Match`` in a bucket with versions: ``OF_CEPH`` has those rows.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pytest

from infra import policies
from infra.policies import ROLES
from infra.rgw import deploy
from s3cache.errors import PreconditionError
from s3cache.store import Store, open_store, parse_url
from tests.infra.attempts import Bucket, client, is_refused, wrong_answers
from tests.support.marks import slow

pytestmark = [
    pytest.mark.rgw,
    pytest.mark.skipif(
        "S3CACHE_TEST_RGW_ENDPOINT" not in os.environ, reason="no Ceph RGW (make test-rgw)"
    ),
]

# The roles that may make an attempt, where Ceph differs.
OF_CEPH = {
    "overwrite main": "main operator",
    "overwrite main with parts": "main operator",
    "copy to main": "main operator",
    "overwrite pulls": "pulls operator",
    "overwrite pulls with parts": "pulls operator",
    "copy to pulls": "pulls operator",
}


def user(who: str, *, over_tls: bool = True) -> Any:
    """Return the client of a user, with the name as access key."""
    names = ("ENDPOINT", "TLS_ENDPOINT", "TLS_CA", "ACCESS_KEY", "SECRET_KEY")
    plain, tls, ca, *owner = (os.environ[f"S3CACHE_TEST_RGW_{name}"] for name in names)
    keys = owner if who == "owner" else (who, f"{who}-secret")
    return client(tls, *keys, verify=ca) if over_tls else client(plain, *keys)


def create_user(name: str) -> None:
    conf = Path(os.environ["S3CACHE_TEST_RGW_DIR"]) / "ceph.conf"
    keys = ["--access-key", name, "--secret-key", f"{name}-secret"]
    command = ["radosgw-admin", "-c", str(conf), "user", "create", "--uid", name]
    subprocess.run([*command, "--display-name", name, *keys], check=True, capture_output=True)


@pytest.fixture(scope="module")
def users() -> dict[str, str]:
    """Create a user for each role; return the user ids, which are the access keys too."""
    run = uuid4().hex[:8]
    named = {role.name: f"{role.name}-{run}" for role in ROLES}
    for user in named.values():
        create_user(user)
    return named


@pytest.fixture(scope="module")
def bucket(users: dict[str, str]) -> Bucket:
    created = Bucket(f"cache-{uuid4().hex}", user("owner"))
    deploy.deploy(created.owner, created.name, users)
    created.fill()
    return created


@pytest.fixture
async def open_as(users: dict[str, str], bucket: Bucket) -> Any:
    stores: list[Store] = []

    def open_as(role: str) -> Store:
        store = open_store(
            f"s3://{bucket.name}/main",
            endpoint_url=os.environ["S3CACHE_TEST_RGW_TLS_ENDPOINT"],
            ca_bundle=os.environ["S3CACHE_TEST_RGW_TLS_CA"],
            region="us-east-1",
            access_key=users[role],
            secret_key=f"{users[role]}-secret",
        )
        stores.append(store)
        return store

    yield open_as
    for store in stores:
        await store.aclose()


OpenAs = Callable[..., Store]


@pytest.mark.parametrize(
    "role",
    [pytest.param(role, id=role.name, marks=() if role.name == "main" else slow) for role in ROLES],
)
def test_a_role_may_make_exactly_its_attempts_and_none_without_tls(
    role: policies.Role, users: dict[str, str], bucket: Bucket
) -> None:
    assert wrong_answers(role.name, user(users[role.name]), bucket, OF_CEPH) == []
    for attempt in ("read main", "list main", "add to main"):
        assert is_refused(attempt, user(users[role.name], over_tls=False), bucket)


def test_overwritten_content_is_kept_as_a_version(users: dict[str, str], bucket: Bucket) -> None:
    """A job may overwrite on Ceph, but the operator can still read the old content."""
    target = bucket.fresh("main")
    user(users["main"]).put_object(Body=b"other", **target)
    operator = user(users["operator"])
    versions = operator.list_object_versions(Bucket=bucket.name, Prefix=target["Key"])["Versions"]
    bodies = [
        operator.get_object(VersionId=version["VersionId"], **target)["Body"].read()
        for version in versions
    ]
    assert sorted(bodies) == [b"bytes", b"other"]


async def test_a_job_checks_before_it_creates_if_ceph_ignores_the_condition(
    open_as: OpenAs,
) -> None:
    """With versions, Ceph 16 lets a write with ``If-None-Match: *`` replace an object."""
    store = open_as("main")
    await store.put("once", b"first", mode="create")
    assert await store.atomic_create() is False
    with pytest.raises(PreconditionError):
        await store.put("once", b"second", mode="create")
    assert await store.get("once") == b"first"


async def test_an_absent_object_is_a_miss_and_not_a_refusal(open_as: OpenAs) -> None:
    for role in ROLES:
        store = open_as(role.name)
        assert await store.get("absent") is None
        assert await store.head("absent") is None


def test_deploy_can_run_again_and_prints_the_settings(
    users: dict[str, str],
    bucket: Bucket,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", os.environ["S3CACHE_TEST_RGW_ACCESS_KEY"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", os.environ["S3CACHE_TEST_RGW_SECRET_KEY"])
    endpoint = os.environ["S3CACHE_TEST_RGW_TLS_ENDPOINT"]
    arguments = ["--endpoint", endpoint, "--bucket", bucket.name]
    arguments += ["--ca-bundle", os.environ["S3CACHE_TEST_RGW_TLS_CA"]]
    for role, user in users.items():
        arguments += [f"--{role}", user]
    before = bucket.owner.get_bucket_policy(Bucket=bucket.name)["Policy"]
    deploy.main(arguments)
    assert bucket.owner.get_bucket_policy(Bucket=bucket.name)["Policy"] == before
    urls = [line.partition("=")[2] for line in capsys.readouterr().out.splitlines()]
    for url, prefix in zip(urls, ["main", "pulls"], strict=True):
        where: Any = parse_url(url)
        assert (where.bucket, where.prefix) == (bucket.name, prefix)
        assert urlsplit(where.endpoint_url).scheme == "https"


def test_the_bucket_has_versions_and_a_lifecycle(bucket: Bucket) -> None:
    assert bucket.owner.get_bucket_versioning(Bucket=bucket.name)["Status"] == "Enabled"
    accepted = bucket.owner.get_bucket_lifecycle_configuration(Bucket=bucket.name)["Rules"]
    wanted = policies.lifecycle("rgw")["Rules"]
    by_id = {rule["ID"]: rule for rule in accepted}
    assert len(by_id) == len(wanted)
    for rule in wanted:
        assert {name: by_id[rule["ID"]][name] for name in rule} == rule
