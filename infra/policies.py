"""The only definition of the rights in the bucket, for AWS, MinIO and Ceph RGW.

``python -m infra.generate`` writes the deployed files from here: the JSON files in ``aws`` and
``minio``, and ``aws/template.yaml``. ``rgw/deploy.py`` imports it.

A prefix is a trust domain: its writers decide which entries its readers find. Signatures decide
which of these entries the readers run, see docs/trust.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

__all__ = [
    "MAIN",
    "PULLS",
    "ROLES",
    "Place",
    "Role",
    "Rule",
    "bucket_policy",
    "guards",
    "identity_policy",
    "lifecycle",
    "rules",
]

Place: TypeAlias = Literal["aws", "minio", "rgw"]
Statement: TypeAlias = dict[str, Any]

#: Prefix that protected builds write, and everybody reads.
MAIN: Final = "main"
#: Prefix that pull requests write; no other job reads it.
PULLS: Final = "pulls"

_VERSION: Final = "2012-10-17"


@dataclass(frozen=True)
class Role:
    """Someone with credentials for the bucket.

    Attributes:
        file: name of its policy files.
        operates: whether it may overwrite and delete, versions too.
    """

    name: str
    file: str
    what: str
    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()
    operates: bool = False


#: No job deletes or overwrites. Only a person may, with credentials that no job has.
ROLES: Final = (
    Role("main", "s3cache-policy", "protected CI, which signs for main", (MAIN,), (MAIN,)),
    Role(
        "pulls",
        "s3cache-pulls-policy",
        "pull requests, which sign for pulls and read both",
        (MAIN, PULLS),
        (PULLS,),
    ),
    Role("reader", "s3cache-reader-policy", "training and whatever else only reads", (MAIN,)),
    Role(
        "operator",
        "s3cache-operator-policy",
        "a person who takes entries out of the cache",
        (MAIN, PULLS),
        (MAIN, PULLS),
        operates=True,
    ),
)


# -- allowed actions


def identity_policy(role: Role, bucket: str, place: Place) -> dict[str, Any]:
    """Return the rights of the role, as a policy to attach to it.

    Args:
        bucket: ARN of the bucket.
    """
    return {"Version": _VERSION, "Statement": [*_allows(role, bucket, place)]}


def _allows(role: Role, bucket: str, place: Place) -> Iterator[Statement]:
    yield _allow("ReadEntries", ["s3:GetObject"], _objects(bucket, role.reads))
    if role.writes:
        actions = ["s3:AbortMultipartUpload", "s3:PutObject"]
        yield _allow("AddEntries", actions, _objects(bucket, role.writes))
    if role.operates:
        actions = ["s3:DeleteObject", "s3:DeleteObjectVersion", "s3:GetObjectVersion"]
        yield _allow("TakeEntriesOutForGood", actions, _objects(bucket, role.writes))
    # Without it S3 answers 403 for an absent object, and each miss would look like a refusal.
    actions = ["s3:ListBucket", *(["s3:ListBucketVersions"] if role.operates else [])]
    yield {
        **_allow("ListEntriesAndTellAbsentFromForbidden", actions, [bucket]),
        "Condition": {
            # A GetObject has no s3:prefix, so a plain StringLike would not match it.
            # MinIO refuses ...IfExists, and answers 404 to any signed request.
            "StringLike" if place == "minio" else "StringLikeIfExists": {
                "s3:prefix": [f"{prefix}/*" for prefix in role.reads]
            }
        },
    }


def _allow(sid: str, actions: list[str], resources: list[str]) -> Statement:
    return {"Sid": sid, "Effect": "Allow", "Action": actions, "Resource": resources}


def _objects(bucket: str, prefixes: tuple[str, ...]) -> list[str]:
    return [f"{bucket}/{prefix}/*" for prefix in prefixes]


# -- denied to all, even if another policy allows it


def guards(
    bucket: str, operator: str, place: Place, jobs: Sequence[object] = ()
) -> list[Statement]:
    """Return statements of the bucket's policy that also bind principals with other policies.

    Args:
        bucket: ARN of the bucket.
        operator: ARN of the role that may overwrite and delete.
        jobs: ARNs of the roles that may only read, add and list.
    """
    everything = [bucket, f"{bucket}/*"]
    if place == "rgw":
        # Ceph 16 leaves aws:SecureTransport out for requests over plain http. It knows neither
        # s3:if-none-match (a statement with it would deny all writes) nor aws:PrincipalArn: it
        # cannot deny overwriting, so versions must keep the old objects.
        is_plain = {"BoolIfExists": {"aws:SecureTransport": "false"}}
        return [_deny("RequireTls", ["s3:*"], everything, is_plain)]
    others = {"ArnNotEquals": {"aws:PrincipalArn": operator}}
    return [
        _deny("RequireTls", ["s3:*"], everything, {"Bool": {"aws:SecureTransport": "false"}}),
        _deny(
            "RequireConditionalWrites",
            ["s3:PutObject"],
            [f"{bucket}/*"],
            {
                "Null": {"s3:if-none-match": "true"},
                # Requests that begin an upload in parts, or send a part, take no such condition:
                # https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes-enforce.html
                "Bool": {"s3:ObjectCreationOperation": "true"},
                **others,
            },
        ),
        _deny(
            "KeepEntries",
            ["s3:DeleteObject", "s3:DeleteObjectVersion"],
            [f"{bucket}/*"],
            others,
        ),
        # Expiry, versions, replication and this policy can end entries too; S3 may add others.
        # Only for jobs: the principal that deploys must change them, and is not known here.
        {
            "Sid": "KeepJobsToWhatTheyAreFor",
            "Effect": "Deny",
            "Principal": "*",
            "NotAction": sorted(_actions_of_jobs(bucket, place)),
            "Resource": everything,
            "Condition": {"ArnEquals": {"aws:PrincipalArn": [*jobs]}},
        },
    ]


def _actions_of_jobs(bucket: str, place: Place) -> set[str]:
    jobs = [role for role in ROLES if not role.operates]
    allowed = [statement for role in jobs for statement in _allows(role, bucket, place)]
    return {action for statement in allowed for action in statement["Action"]}


def _deny(sid: str, actions: list[str], resources: list[str], condition: Any) -> Statement:
    return {
        "Sid": sid,
        "Effect": "Deny",
        "Principal": "*",
        "Action": actions,
        "Resource": resources,
        "Condition": condition,
    }


def bucket_policy(bucket: str, users: Mapping[str, str]) -> dict[str, Any]:
    """Return all rights as one policy of the bucket: for Ceph RGW, where users have no policies.

    Args:
        bucket: ARN of the bucket.
        users: ARN of the user of each role, by the role's name.
    """
    statements = [
        {
            **statement,
            "Sid": f"{statement['Sid']}{role.name.title()}",
            "Principal": {"AWS": [users[role.name]]},
        }
        for role in ROLES
        if role.name in users
        for statement in _allows(role, bucket, "rgw")
    ]
    operator = users.get("operator", "")
    return {"Version": _VERSION, "Statement": [*statements, *guards(bucket, operator, "rgw")]}


# -- lifetimes


@dataclass(frozen=True)
class Rule:
    """Lifetimes under a prefix, in days.

    Attributes:
        entries: of entries, from the write.
        replaced: of versions that were overwritten or deleted, so that a person can look at them.
        incomplete: of multipart uploads that were not completed.
    """

    prefix: str
    entries: int
    replaced: int = 7
    incomplete: int = 1


def rules(place: Place) -> tuple[Rule, ...]:
    return (Rule(MAIN, 30 if place == "minio" else 90), Rule(PULLS, 14))


def lifecycle(place: Place) -> dict[str, Any]:
    """Return the rules in the form of ``PutBucketLifecycleConfiguration``."""
    return {"Rules": [each for rule in rules(place) for each in _lifecycle(rule, place)]}


def _lifecycle(rule: Rule, place: Place) -> Iterator[dict[str, Any]]:
    def named(name: str, **what: object) -> dict[str, Any]:
        return {
            "ID": f"{name}-{rule.prefix}",
            "Status": "Enabled",
            "Filter": {"Prefix": f"{rule.prefix}/"},
            **what,
        }

    yield named("expire", Expiration={"Days": rule.entries})
    leases = {"Filter": {"Prefix": f"{rule.prefix}/leases/"}, "Expiration": {"Days": 1}}
    yield {**named("expire-leases"), **leases}
    yield named("forget-versions", NoncurrentVersionExpiration={"NoncurrentDays": rule.replaced})
    if place != "minio":  # it has a server setting instead: minio/compose.yaml
        abort = {"DaysAfterInitiation": rule.incomplete}
        yield named("abort-incomplete-uploads", AbortIncompleteMultipartUpload=abort)
