"""Who may do what in the bucket: the one place that says so, for AWS, MinIO and Ceph RGW.

``make policies`` writes from here what is deployed: the JSON files in ``aws`` and ``minio``, and
``aws/template.yaml``. ``rgw/deploy.py`` asks here when it runs.

A prefix is a trust domain: who can write under it decides what its readers are offered. Which
of it they run is decided by signatures, see docs/trust.md.
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

#: What protected builds write, and everybody reads.
MAIN: Final = "main"
#: What pull requests write, and only they read.
PULLS: Final = "pulls"

_VERSION: Final = "2012-10-17"


@dataclass(frozen=True)
class Role:
    """Someone with credentials for the bucket.

    Attributes:
        file: the name of its policies' files.
        operates: may overwrite and delete, versions too.
    """

    name: str
    file: str
    what: str
    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()
    operates: bool = False


#: No job deletes or overwrites: that is for a person with credentials that no job has.
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


# -- what is allowed


def identity_policy(role: Role, bucket: str, place: Place) -> dict[str, Any]:
    """What the role may do, as a policy that is attached to it.

    Args:
        bucket: its ARN.
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
    # Without it S3 answers 403 where there is no object, and each miss would look like a refusal.
    actions = ["s3:ListBucket", *(["s3:ListBucketVersions"] if role.operates else [])]
    yield {
        **_allow("ListEntriesAndTellAbsentFromForbidden", actions, [bucket]),
        "Condition": {
            # A GetObject carries no s3:prefix, so that a plain StringLike would not match there.
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


# -- what is denied to all, whatever else allows it


def guards(
    bucket: str, operator: str, place: Place, jobs: Sequence[object] = ()
) -> list[Statement]:
    """Statements of the bucket's policy that also hold for principals with rights from elsewhere.

    Args:
        bucket: its ARN.
        operator: that of the one who may overwrite and delete.
        jobs: those of the roles that do nothing in the bucket but what they are for.
    """
    everything = [bucket, f"{bucket}/*"]
    if place == "rgw":
        # Ceph 16 leaves aws:SecureTransport out where a request came over plain http. It knows
        # neither s3:if-none-match (a statement with it would deny all writes) nor
        # aws:PrincipalArn: overwriting cannot be denied there, so versions have to do.
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
                # Beginning an upload in parts, and sending one, take no such condition:
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
        # Expiry, versions, replication and this very policy end entries too; S3 may learn others.
        # Not for everybody: the principal that deploys has to change them, and is not known here.
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
    """All of it as one policy of the bucket: for Ceph RGW, where users have none of their own.

    Args:
        bucket: its ARN.
        users: the ARN of a user for each name of a role.
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


# -- how long things stay


@dataclass(frozen=True)
class Rule:
    """How long what lies under a prefix stays, in days; counted from when it was written.

    Attributes:
        replaced: versions that were overwritten or deleted, for as long as somebody may want to
            see what they were.
        incomplete: multipart uploads that were not completed.
    """

    prefix: str
    entries: int
    replaced: int = 7
    incomplete: int = 1


def rules(place: Place) -> tuple[Rule, ...]:
    return (Rule(MAIN, 30 if place == "minio" else 90), Rule(PULLS, 14))


def lifecycle(place: Place) -> dict[str, Any]:
    """The rules as ``PutBucketLifecycleConfiguration`` takes them."""
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
    if place != "minio":  # which has a setting of the server for it: minio/compose.yaml
        abort = {"DaysAfterInitiation": rule.incomplete}
        yield named("abort-incomplete-uploads", AbortIncompleteMultipartUpload=abort)
