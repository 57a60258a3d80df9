"""Deployed policies match ``infra/policies.py``, and allow the operations of the S3 store."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from botocore import xform_name

from infra import generate, policies
from infra.policies import ROLES, Role

ROOT = Path(__file__).parents[2]
INFRA = ROOT / "infra"
STORE_SOURCES = sorted((ROOT / "s3cache" / "store").glob("_s3*.py"))

# https://docs.aws.amazon.com/AmazonS3/latest/userguide/using-with-s3-policy-actions.html
IAM_ACTION = {
    "abort_multipart_upload": "s3:AbortMultipartUpload",
    "complete_multipart_upload": "s3:PutObject",
    "create_multipart_upload": "s3:PutObject",
    "delete_object": "s3:DeleteObject",
    "delete_objects": "s3:DeleteObject",
    "get_object": "s3:GetObject",
    "head_bucket": "s3:ListBucket",
    "head_object": "s3:GetObject",
    "list_objects_v2": "s3:ListBucket",
    "put_object": "s3:PutObject",
    "upload_part": "s3:PutObject",
}
# Without it S3 answers 403 for an absent object, and each miss would look like an outage:
# https://docs.aws.amazon.com/AmazonS3/latest/API/API_GetObject.html
NEEDED_BY_MISSES = "s3:ListBucket"
READING = {"s3:GetObject", "s3:ListBucket"}
# Actions that a person needs in a bucket with versions, and no store uses.
OF_VERSIONS = {"s3:DeleteObjectVersion", "s3:GetObjectVersion", "s3:ListBucketVersions"}

places = pytest.mark.parametrize("place", ["minio", "aws"])
roles = pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
NAMED = {role.name: role for role in ROLES}


def load(place: str, name: str) -> dict[str, Any]:
    return json.loads((INFRA / place / f"{name}.json").read_text())


def operations_used() -> set[str]:
    """Return every S3 operation that the store's source names, as a method or as a string."""
    model = botocore.session.Session().get_service_model("s3")
    known = {xform_name(name) for name in model.operation_names}
    used: set[str] = set()
    for source in STORE_SOURCES:
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Attribute):
                used.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                used.add(node.value)
    return used & known


@pytest.mark.parametrize(
    "path", generate.files(), ids=lambda path: f"{path.parent.name}-{path.name}"
)
def test_deployed_files_are_generated_from_one_source(path: Path) -> None:
    """``python -m infra.generate`` writes the files."""
    assert path.read_text(encoding="utf-8") == generate.files()[path]


@places
@roles
def test_a_role_has_the_rights_that_the_store_needs_under_its_prefixes(
    place: str, role: Role
) -> None:
    """Readers never write, and writers never delete; the operator reaches versions too."""
    wanted = {IAM_ACTION[operation] for operation in operations_used()}
    if role.name == "operator":
        wanted |= OF_VERSIONS
    elif role.name == "reader":
        wanted &= READING
    else:
        wanted -= {"s3:DeleteObject"}
    policy = load(place, role.file)
    actions = {action for statement in policy["Statement"] for action in statement["Action"]}
    assert actions == wanted | {NEEDED_BY_MISSES}
    *on_objects, on_bucket = policy["Statement"]
    (bucket,) = on_bucket["Resource"]
    for statement in on_objects:
        prefixes = role.reads if statement["Action"] == ["s3:GetObject"] else role.writes
        assert statement["Resource"] == [f"{bucket}/{prefix}/*" for prefix in prefixes]
    # A GetObject has no s3:prefix: on AWS a plain StringLike would make a miss a 403. MinIO refuses
    # ...IfExists, and answers 404 to a signed request.
    operator = "StringLikeIfExists" if place == "aws" else "StringLike"
    assert on_bucket["Condition"] == {operator: {"s3:prefix": [f"{each}/*" for each in role.reads]}}


def test_no_trusted_job_reads_where_untrusted_jobs_write() -> None:
    assert NAMED["main"].reads == NAMED["main"].writes == NAMED["reader"].reads == (policies.MAIN,)
    assert NAMED["pulls"].writes == (policies.PULLS,)


@pytest.mark.parametrize(("place", "days"), [("minio", 30), ("aws", 90)])
def test_entries_expire(place: str, days: int) -> None:
    """Old versions and, on AWS, incomplete uploads expire too: nothing else frees their bytes."""
    rules = {rule["ID"]: rule for rule in load(place, "lifecycle")["Rules"]}
    assert {rule["Status"] for rule in rules.values()} == {"Enabled"}
    for prefix, age in (("main", days), ("pulls", 14)):
        assert rules[f"expire-{prefix}"]["Expiration"] == {"Days": age}
        assert rules[f"expire-{prefix}"]["Filter"]["Prefix"] == f"{prefix}/"
        old = rules[f"forget-versions-{prefix}"]["NoncurrentVersionExpiration"]
        assert old == {"NoncurrentDays": 7}
        if place == "aws":
            rule = rules[f"abort-incomplete-uploads-{prefix}"]
            assert rule["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 1}
