"""The template is deployed, and every role makes every attempt on its bucket.

moto's CloudFormation creates the bucket and the roles. For each HTTP request of a client,
``iam.py`` evaluates the roles' policies, read back from moto, and the bucket's policy. Requests
that they allow reach moto's S3.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.policies import ROLES, Role
from s3cache import entries
from s3cache.cache import Cache, Hit, Miss, Saved
from s3cache.errors import AccessDeniedError, PreconditionError
from s3cache.store import open_store
from s3cache.testing import MotoServer
from tests.infra.attempts import Bucket, client, is_refused, wrong_answers
from tests.infra.iam import Policy, Request, is_allowed, s3_requests
from tests.support.caching import KEY, OTHER, entry
from tests.support.fakes import Gate, serving
from tests.support.marks import slow
from tests.support.scripted import Reply, error_reply
from tests.support.scripted import Request as Sent
from tests.support.waiting import LONG_S

# test_policies.py and test_policies_rgw.py have quicker tests of the same policies.
pytestmark = slow

TEMPLATE = Path(__file__).parents[2] / "infra" / "aws" / "template.yaml"
BUCKET = "team-compile-cache"
ISSUER = "oidc.eks.eu-central-1.amazonaws.com/id/0123456789ABCDEF"
OPERATOR = "arn:aws:iam::123456789012:role/platform-team"
PARAMETERS = {
    "BucketName": BUCKET,
    "GitHubRepository": "team/train",
    "KubernetesIssuer": ISSUER,
    "OperatorArn": OPERATOR,
}
# An administrator's policy.
EVERYTHING = {"Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}


@dataclass(frozen=True, eq=False)
class Deployed:
    """The resources that CloudFormation created, as the services describe them."""

    server: MotoServer
    outputs: Mapping[str, str]
    trust: Mapping[str, Policy]
    identity: Mapping[str, list[Policy]]
    bucket_policy: Policy

    def arn(self, role: str) -> str:
        return self.outputs[f"{role.title()}RoleArn"]

    def judge(self, sent: Sent, *, is_secure: bool) -> Reply | None:
        """Return S3's answer if it refuses; the access key of a request is the role's name."""
        role = sent.sent["Authorization"].partition("Credential=")[2].partition("/")[0]
        requests = s3_requests(sent, principal=self.arn(role), is_secure=is_secure)
        if all(is_allowed(each, self.identity[role], [self.bucket_policy]) for each in requests):
            return None
        return error_reply(403, "AccessDenied")


def create_stack(server: MotoServer, parameters: Mapping[str, str]) -> dict[str, str]:
    """Deploy the template, and return its outputs."""
    stacks = client(server.endpoint_url, "owner", service="cloudformation")
    given = [{"ParameterKey": key, "ParameterValue": value} for key, value in parameters.items()]
    stacks.create_stack(
        StackName="compile-cache",
        TemplateBody=TEMPLATE.read_text(),
        Parameters=given,
        Capabilities=["CAPABILITY_IAM"],
    )
    (stack,) = stacks.describe_stacks(StackName="compile-cache")["Stacks"]
    assert stack["StackStatus"] == "CREATE_COMPLETE"
    return {each["OutputKey"]: each["OutputValue"] for each in stack["Outputs"]}


@pytest.fixture(scope="module")
def deployed() -> Iterator[Deployed]:
    with MotoServer() as server:
        yield deploy(server)


def deploy(server: MotoServer) -> Deployed:
    outputs = create_stack(server, PARAMETERS)
    iam, s3 = (client(server.endpoint_url, "owner", service=service) for service in ("iam", "s3"))
    trust, identity = {}, {}
    for role in ROLES:
        name = outputs[f"{role.name.title()}RoleArn"].rpartition("/")[2]
        trust[role.name] = iam.get_role(RoleName=name)["Role"]["AssumeRolePolicyDocument"]
        assert iam.list_role_policies(RoleName=name)["PolicyNames"] == []
        attached = iam.list_attached_role_policies(RoleName=name)["AttachedPolicies"]
        arn = outputs[f"{role.name.title()}PolicyArn"]
        assert [one["PolicyArn"] for one in attached] == [arn]
        version = iam.get_policy_version(PolicyArn=arn, VersionId="v1")["PolicyVersion"]
        identity[role.name] = [version["Document"]]
    # moto's CloudFormation skips versioning, which is set here, and the bucket's policy. The policy
    # is only returned: moto would enforce it without its conditions.
    s3.put_bucket_versioning(
        Bucket=BUCKET, VersioningConfiguration=properties("Bucket")["VersioningConfiguration"]
    )
    document = json.dumps(properties("BucketPolicy")["PolicyDocument"])
    document = document.replace("${Bucket.Arn}", f"arn:aws:s3:::{BUCKET}")
    for role_arn in outputs:
        document = document.replace(f"${{{role_arn.removesuffix('Arn')}.Arn}}", outputs[role_arn])
    assert "${" not in document
    # The one condition of the template holds here.
    policy = json.loads(document, object_hook=lambda each: each.get("Fn::If", [0, each])[1])
    return Deployed(server, outputs, trust, identity, policy)


def properties(resource: str) -> Any:
    return yaml.load(TEMPLATE.read_text(), Loader)["Resources"][resource]["Properties"]


class Loader(yaml.SafeLoader):
    """Loads a template, without substituting its text."""


Loader.add_constructor("!Sub", lambda loader, node: node.value)


@pytest.fixture(scope="module")
def bucket(deployed: Deployed) -> Bucket:
    filled = Bucket(BUCKET, client(deployed.server.endpoint_url, "owner"))
    filled.fill()
    return filled


@pytest.fixture(scope="module")
def over_tls(deployed: Deployed) -> Iterator[str]:
    with endpoint(deployed, is_secure=True) as url:
        yield url


def endpoint(deployed: Deployed, *, is_secure: bool) -> AbstractContextManager[str]:
    """Return an S3 endpoint that enforces the policies, as if requests came over TLS or not."""
    return serving(Gate(deployed.server.port, partial(deployed.judge, is_secure=is_secure)))


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_a_role_may_make_exactly_its_attempts_and_none_without_tls(
    role: Role, deployed: Deployed, bucket: Bucket, over_tls: str
) -> None:
    assert wrong_answers(role.name, client(over_tls, role.name), bucket) == []
    with endpoint(deployed, is_secure=False) as url:
        for attempt in ("read main", "list main", "add to main"):
            assert is_refused(attempt, client(url, role.name), bucket)


def test_other_rights_allow_neither_overwriting_nor_deleting(deployed: Deployed) -> None:
    # ``own`` is a role outside the template, with one of its policies attached.
    own = "arn:aws:iam::123456789012:role/training"
    for who in (deployed.arn("main"), deployed.arn("pulls"), deployed.arn("reader"), own):
        for method, headers, expected in [
            ("GET", {}, True),
            ("PUT", {"If-None-Match": "*"}, True),
            ("PUT", {}, False),
            ("DELETE", {}, False),
        ]:
            sent = Sent(method, f"/{BUCKET}/main/x", {}, b"", headers)
            (request,) = s3_requests(sent, principal=who, is_secure=True)
            assert is_allowed(request, [EVERYTHING], [deployed.bucket_policy]) == expected


# Writing actions: https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazons3.html
CHANGES = """
    BypassGovernanceRetention DeleteBucket DeleteBucketPolicy DeleteBucketWebsite
    DeleteObjectTagging DeleteObjectVersionTagging ObjectOwnerOverrideToBucketOwner
    PutAccelerateConfiguration PutBucketAcl PutBucketCORS PutBucketLogging PutBucketNotification
    PutBucketObjectLockConfiguration PutBucketOwnershipControls PutBucketPolicy
    PutBucketPublicAccessBlock PutBucketTagging PutBucketVersioning PutBucketWebsite
    PutEncryptionConfiguration PutIntelligentTieringConfiguration PutInventoryConfiguration
    PutLifecycleConfiguration PutObjectAcl PutObjectLegalHold PutObjectRetention PutObjectTagging
    PutObjectVersionAcl PutObjectVersionTagging PutReplicationConfiguration ReplicateDelete
    ReplicateObject ReplicateTags RestoreObject WhatIsAddedNextYear
"""


@pytest.mark.parametrize("role", ["main", "pulls", "reader"])
def test_a_job_with_all_rights_cannot_change_what_deletes_entries(
    role: str, deployed: Deployed
) -> None:
    """Expiry, versioning and replication delete too, and the bucket's policy protects them."""
    context = {"aws:PrincipalArn": deployed.arn(role), "aws:SecureTransport": "true"}
    for action in CHANGES.split():
        for resource in (f"arn:aws:s3:::{BUCKET}", f"arn:aws:s3:::{BUCKET}/main/x"):
            request = Request(deployed.arn(role), f"s3:{action}", resource, context)
            assert not is_allowed(request, [EVERYTHING], [deployed.bucket_policy]), action
    # The role that deploys may change them.
    deployer = "arn:aws:iam::123456789012:role/deployer"
    request = Request(
        deployer, "s3:PutBucketPolicy", f"arn:aws:s3:::{BUCKET}",
        {**context, "aws:PrincipalArn": deployer},
    )  # fmt: skip
    assert is_allowed(request, [EVERYTHING], [deployed.bucket_policy])


# -- which tokens and principals may assume a role

GITHUB = "token.actions.githubusercontent.com"


AUDIENCE = "sts.amazonaws.com"
REPOSITORY, ACCOUNT = "repo:team/train", "system:serviceaccount:training"
# Issuer, audience and subject of a token, and the only role that it may assume.
TOKENS = {
    "environment": (GITHUB, AUDIENCE, f"{REPOSITORY}:environment:compile-cache", "main"),
    "pull request": (GITHUB, AUDIENCE, f"{REPOSITORY}:pull_request", "pulls"),
    "branch only": (GITHUB, AUDIENCE, f"{REPOSITORY}:ref:refs/heads/main", ""),
    "another environment": (GITHUB, AUDIENCE, f"{REPOSITORY}:environment:docs", ""),
    "fork": (GITHUB, AUDIENCE, f"{REPOSITORY}-fork:environment:compile-cache", ""),
    "other audience": (GITHUB, "api.example.com", f"{REPOSITORY}:environment:compile-cache", ""),
    "service account": (ISSUER, AUDIENCE, f"{ACCOUNT}:compile-cache-reader", "reader"),
    "another account": (ISSUER, AUDIENCE, f"{ACCOUNT}:default", ""),
    "another cluster": (f"{ISSUER}0", AUDIENCE, f"{ACCOUNT}:compile-cache-reader", ""),
    "false GitHub": (ISSUER, AUDIENCE, f"{REPOSITORY}:environment:compile-cache", ""),
}


@pytest.mark.parametrize(
    ("issuer", "audience", "subject", "expected"), TOKENS.values(), ids=TOKENS.keys()
)
def test_a_token_may_assume_its_role_and_no_other(
    issuer: str, audience: str, subject: str, expected: str, deployed: Deployed
) -> None:
    provider = f"arn:aws:iam::123456789012:oidc-provider/{issuer}"
    context = {f"{issuer}:aud": audience, f"{issuer}:sub": subject}
    request = Request(provider, "sts:AssumeRoleWithWebIdentity", "", context)
    assumed = [
        role for role, trust in deployed.trust.items() if is_allowed(request, resource=[trust])
    ]
    assert assumed == ([expected] if expected else [])
    # Only the named principal may assume the operator's role.
    for who, roles in ((OPERATOR, ["operator"]), ("arn:aws:iam::123456789012:role/ci", [])):
        request = Request(who, "sts:AssumeRole", "")
        trust = deployed.trust.items()
        assert [role for role, each in trust if is_allowed(request, resource=[each])] == roles


# -- the bucket


def test_without_a_cluster_only_the_readers_policy_is_created() -> None:
    with MotoServer() as server:
        outputs = create_stack(server, {**PARAMETERS, "KubernetesIssuer": ""})
    assert "ReaderPolicyArn" in outputs
    assert "ReaderRoleArn" not in outputs


# -- s3cache with these rights


def access(role: str, endpoint: str) -> dict[str, Any]:
    keys = {"access_key": role, "secret_key": "secret", "region": "us-east-1"}
    return {"endpoint_url": endpoint, "conditional_create": "native", **keys}


@pytest.mark.parametrize("role", ["main", "pulls"])
async def test_the_store_of_a_writing_role_works_and_overwrites_nothing(
    role: str, deployed: Deployed, over_tls: str
) -> None:
    """Every object that a job adds is sent with ``If-None-Match``, even a large one."""
    url = deployed.outputs[f"{role.title()}Url"]
    parts: dict[str, Any] = {"multipart_bytes": 5 * 2**20, "part_bytes": 5 * 2**20}
    store = open_store(url, **access(role, over_tls), **parts)
    try:
        assert await store.get("absent") is None
        for name, data in {"small": b"small", "large": bytes(5 * 2**20 + 1)}.items():
            await store.put(name, data, mode="create")
            assert await store.get(name) == data
            with pytest.raises(PreconditionError):
                await store.put(name, b"other", mode="create")
            with pytest.raises(AccessDeniedError):
                await store.put(name, b"other")
            with pytest.raises(AccessDeniedError):
                await store.delete(name)
            assert await store.get(name) == data
        assert {info.key async for info in store.list("")} >= {"small", "large"}
    finally:
        await store.aclose()


def test_a_damaged_entry_waits_for_the_operator_and_blocks_no_other_upload(
    deployed: Deployed, over_tls: str, tmp_path: Path
) -> None:
    """Only the operator may remove it; jobs get a miss."""
    damaged = {"Bucket": BUCKET, "Key": f"main/{entries.first_name(KEY)}"}
    client(deployed.server.endpoint_url, "owner").put_object(Body=b"damaged", **damaged)

    def open_as(role: str, **more: Any) -> Cache:
        return Cache.open(deployed.outputs["MainUrl"], **access(role, over_tls), **more)

    with open_as("main", local_dir=tmp_path / "main") as cache:
        found = cache.lookup(KEY)
        assert isinstance(found, Miss)
        assert found.reason == "corrupt"
        for key in (KEY, OTHER):
            assert isinstance(cache.save(key, entry(key)), Saved)
        assert cache.flush(20).remaining == 1
        with open_as("reader", local=False, mode="read-only") as reader:
            assert isinstance(reader.lookup(KEY), Miss)
            assert isinstance(reader.lookup(OTHER), Hit)
        client(over_tls, "operator").delete_object(**damaged)
        assert cache.flush(LONG_S).complete
    with open_as("reader", local=False, mode="read-only") as reader:
        assert isinstance(reader.lookup(KEY), Hit)
