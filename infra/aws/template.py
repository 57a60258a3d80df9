"""The CloudFormation template: the bucket, its guards, and a role for each trust domain."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import yaml

from infra import policies
from infra.policies import Role, Rule

__all__ = ["render"]

_HEADER: Final = """\
# Written by infra/generate.py from infra/policies.py and infra/aws/template.py: change those.
#
# aws cloudformation deploy --stack-name compile-cache --template-file template.yaml \\
#   --capabilities CAPABILITY_IAM --parameter-overrides BucketName=... GitHubRepository=... ...
"""

_GITHUB: Final = "token.actions.githubusercontent.com"
_PROVIDER: Final = "arn:${AWS::Partition}:iam::${AWS::AccountId}:oidc-provider"

_CONDITION: Final = "HasKubernetes"

_PARAMETERS: Final[dict[str, dict[str, str]]] = {
    "BucketName": {
        "Type": "String",
        "Description": "Name of the bucket. Keep only the cache in it: readers see all its keys.",
        "AllowedPattern": "[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]",
    },
    "GitHubRepository": {
        "Type": "String",
        "Description": "OWNER/NAME of the repository with the CI that fills the cache.",
        "AllowedPattern": "[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+",
    },
    "GitHubEnvironment": {
        "Type": "String",
        "Description": (
            "The environment of protected builds. It holds the key that signs for main, so GitHub "
            "must let only the protected branch deploy to it."
        ),
        "Default": "compile-cache",
        "AllowedPattern": "[A-Za-z0-9_.-]+",
    },
    "KubernetesIssuer": {
        "Type": "String",
        "Description": (
            "Issuer of the cluster's tokens, without https://. It must be an identity provider in "
            "IAM. Without an issuer, the stack has no reader's role, only its policy."
        ),
        "Default": "",
        "AllowedPattern": "([A-Za-z0-9.-]+(/[A-Za-z0-9._/-]+)?)?",
    },
    "KubernetesServiceAccount": {
        "Type": "String",
        "Description": "NAMESPACE:NAME of the service account of jobs that only read.",
        "Default": "training:compile-cache-reader",
        "AllowedPattern": "[a-z0-9-]+:[a-z0-9.-]+",
    },
    "OperatorArn": {
        "Type": "String",
        "Description": "Role or user that may become the operator: for people, never for jobs.",
        "AllowedPattern": "arn:[a-z-]+:iam::[0-9]{12}:(role|user)/.+",
    },
}


class _Substituted(str):
    """Text in which CloudFormation replaces ``${...}``."""

    __slots__ = ()


def render() -> str:
    """Return the template as YAML."""

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

        def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
            super().increase_indent(flow, False)

    def substituted(dumper: yaml.SafeDumper, text: _Substituted) -> yaml.ScalarNode:
        return dumper.represent_scalar("!Sub", str(text), style="|" if "\n" in text else '"')

    Dumper.add_representer(_Substituted, substituted)
    body = yaml.dump(_template(), Dumper=Dumper, sort_keys=False, width=100)
    return f"{_HEADER}{body}"


def _template() -> dict[str, Any]:
    template = {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": "A bucket for s3cache, with one role for each trust domain.",
        "Parameters": _PARAMETERS,
        "Conditions": {
            _CONDITION: {"Fn::Not": [{"Fn::Equals": [{"Ref": "KubernetesIssuer"}, ""]}]}
        },
        "Resources": dict(_resources()),
        "Outputs": dict(_outputs()),
    }
    substituted: dict[str, Any] = _substitute(template)
    return substituted


def _substitute(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _substitute(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_substitute(inner) for inner in value]
    return _Substituted(value) if isinstance(value, str) and "${" in value else value


def _resources() -> Iterator[tuple[str, dict[str, Any]]]:
    yield (
        "Bucket",
        {
            "Type": "AWS::S3::Bucket",
            "DeletionPolicy": "Retain",
            "UpdateReplacePolicy": "Retain",
            "Properties": {
                "BucketName": "${BucketName}",
                "VersioningConfiguration": {"Status": "Enabled"},
                "OwnershipControls": {"Rules": [{"ObjectOwnership": "BucketOwnerEnforced"}]},
                "PublicAccessBlockConfiguration": {
                    "BlockPublicAcls": True,
                    "BlockPublicPolicy": True,
                    "IgnorePublicAcls": True,
                    "RestrictPublicBuckets": True,
                },
                "LifecycleConfiguration": {
                    "Rules": [_lifecycle_rule(rule) for rule in policies.rules("aws")]
                },
            },
        },
    )
    jobs = [_if_there(role, _arn(role)) for role in policies.ROLES if not role.operates]
    guards = policies.guards("${Bucket.Arn}", "${OperatorRole.Arn}", "aws", jobs)
    yield (
        "BucketPolicy",
        {
            "Type": "AWS::S3::BucketPolicy",
            "Properties": {
                "Bucket": "${Bucket}",
                "PolicyDocument": {"Version": "2012-10-17", "Statement": guards},
            },
        },
    )
    for role in policies.ROLES:
        yield f"{_title(role)}Role", _role(role)
        yield f"{_title(role)}Policy", _managed_policy(role)


def _lifecycle_rule(rule: Rule) -> dict[str, Any]:
    return {
        "Id": rule.prefix,
        "Status": "Enabled",
        "Prefix": f"{rule.prefix}/",
        "ExpirationInDays": rule.entries,
        "NoncurrentVersionExpiration": {"NoncurrentDays": rule.replaced},
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": rule.incomplete},
    }


def _managed_policy(role: Role) -> dict[str, Any]:
    # Managed, so that existing roles of nodes and users can have it too.
    attached = _if_there(role, [f"${{{_title(role)}Role}}"])
    return {
        "Type": "AWS::IAM::ManagedPolicy",
        "Properties": {
            "Description": f"s3cache: {role.what}",
            "PolicyDocument": policies.identity_policy(role, "${Bucket.Arn}", "aws"),
            "Roles": attached,
        },
    }


def _role(role: Role) -> dict[str, Any]:
    return {
        "Type": "AWS::IAM::Role",
        **_conditions(role),
        "Properties": {
            "Description": f"s3cache: {role.what}",
            "AssumeRolePolicyDocument": _trust(role),
        },
    }


def _trust(role: Role) -> dict[str, Any] | str:
    """Return the policy that says who may assume the role."""
    if role.name == "main":
        # The subject names an environment, not a branch: only a job that the environment's rules
        # admit has this subject, and the key that signs for main.
        return _web(_GITHUB, "repo:${GitHubRepository}:environment:${GitHubEnvironment}")
    if role.name == "pulls":
        return _web(_GITHUB, "repo:${GitHubRepository}:pull_request")
    if role.name == "reader":
        # JSON text, as CloudFormation substitutes nothing in names of members.
        document = _web("${KubernetesIssuer}", "system:serviceaccount:${KubernetesServiceAccount}")
        return json.dumps(document, indent=2)
    statement = {
        "Effect": "Allow",
        "Principal": {"AWS": "${OperatorArn}"},
        "Action": "sts:AssumeRole",
    }
    return {"Version": "2012-10-17", "Statement": [statement]}


def _web(issuer: str, subject: str) -> dict[str, Any]:
    statement = {
        "Effect": "Allow",
        "Principal": {"Federated": f"{_PROVIDER}/{issuer}"},
        "Action": "sts:AssumeRoleWithWebIdentity",
        "Condition": {
            "StringEquals": {f"{issuer}:aud": "sts.amazonaws.com", f"{issuer}:sub": subject}
        },
    }
    return {"Version": "2012-10-17", "Statement": [statement]}


def _outputs() -> Iterator[tuple[str, dict[str, str]]]:
    for prefix in (policies.MAIN, policies.PULLS):
        yield (
            f"{prefix.title()}Url",
            {"Description": "S3CACHE_URL", "Value": f"s3://${{Bucket}}/{prefix}"},
        )
    for role in policies.ROLES:
        yield (
            f"{_title(role)}RoleArn",
            {
                "Description": role.what,
                **_conditions(role),
                "Value": _arn(role),
            },
        )
        yield (
            f"{_title(role)}PolicyArn",
            {
                "Description": f"For existing roles: {role.what}",
                "Value": f"${{{_title(role)}Policy}}",
            },
        )


def _arn(role: Role) -> str:
    return f"${{{_title(role)}Role.Arn}}"


def _if_there(role: Role, value: object) -> object:
    return {"Fn::If": [_CONDITION, value, {"Ref": "AWS::NoValue"}]} if _conditions(role) else value


def _conditions(role: Role) -> dict[str, str]:
    return {"Condition": _CONDITION} if role.name == "reader" else {}


def _title(role: Role) -> str:
    return role.name.title()
