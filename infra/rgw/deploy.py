"""Set up a bucket on Ceph RGW: versions, lifecycle, and a policy with the rights of each user.

    python -m infra.rgw.deploy --endpoint https://rgw.example.com --bucket compile-cache \\
        --main ci --pulls ci-pulls --reader trainer --operator ada

Users are given as ``UID`` or ``TENANT$UID`` and must exist (``radosgw-admin user create``). The
bucket's owner, who is none of these users, runs it with the credentials of AWS's tools
(``AWS_ACCESS_KEY_ID`` and so on). It may be run again: it overwrites earlier settings.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from infra import policies

__all__ = ["deploy", "main", "user_arn"]


def main(arguments: Sequence[str] | None = None) -> None:
    import boto3
    from botocore.config import Config

    options = _parser().parse_args(arguments)
    users = {role.name: getattr(options, role.name) for role in policies.ROLES}
    client = boto3.client(
        "s3",
        endpoint_url=options.endpoint,
        region_name=options.region,
        verify=options.ca_bundle,
        # Ceph 16 accepts no checksums after the body.
        config=Config(
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"addressing_style": "path"},
        ),
    )
    deploy(client, options.bucket, {name: uid for name, uid in users.items() if uid is not None})
    for prefix in (policies.MAIN, policies.PULLS):
        url = f"s3://{options.bucket}/{prefix}?endpoint_url={options.endpoint}"
        sys.stdout.write(f"S3CACHE_URL={url}&region={options.region}\n")


def deploy(client: Any, bucket: str, users: Mapping[str, str]) -> None:
    """Create the bucket if it does not exist, and configure it.

    Args:
        client: boto3's client of the bucket's owner.
        users: user of each role, by the role's name; roles may be left out.
    """
    # Policy first: from here on, objects cannot be read over plain http.
    client.create_bucket(Bucket=bucket)
    arns = {role: user_arn(user) for role, user in users.items()}
    policy = policies.bucket_policy(f"arn:aws:s3:::{bucket}", arns)
    client.put_bucket_policy(Bucket=bucket, Policy=json.dumps(policy))
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    client.put_bucket_lifecycle_configuration(
        Bucket=bucket, LifecycleConfiguration=policies.lifecycle("rgw")
    )


def user_arn(user: str) -> str:
    """Return the name of ``UID`` or ``TENANT$UID`` in Ceph's policies."""
    tenant, _, uid = user.rpartition("$")
    return f"arn:aws:iam::{tenant}:user/{uid}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m infra.rgw.deploy", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--endpoint", required=True, help="URL of the gateway, https://...")
    parser.add_argument("--bucket", required=True)
    parser.add_argument("--region", default="us-east-1", help="of the zonegroup (%(default)s)")
    parser.add_argument("--ca-bundle", help="certificates to trust, if not the system's")
    for role in policies.ROLES:
        parser.add_argument(f"--{role.name}", metavar="USER", help=role.what)
    return parser


if __name__ == "__main__":
    main()
