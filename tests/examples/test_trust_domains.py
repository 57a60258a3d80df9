"""The examples of trust domains agree with the template, with the settings, and with each other."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from infra import policies
from s3cache.settings import Settings
from s3cache.store import parse_url
from s3cache.trust import parse_trusted
from tests.support.pages import ROOT

EXAMPLE = ROOT / "examples" / "trust_domains"
KEY = "ci-1:XLVVk5wMsal8CJdY9Rdppue/yvelCkr67tq0z+fmsFQ="


# This loader reads all values as text, also placeholders and ``on``.
TEMPLATE: Any = yaml.load((ROOT / "infra" / "aws" / "template.yaml").read_text(), yaml.BaseLoader)


def workflow(name: str) -> Any:
    return yaml.load((EXAMPLE / "github" / f"{name}.yml").read_text(), yaml.BaseLoader)


def job(name: str) -> Any:
    (found,) = workflow(name)["jobs"].values()
    return found


def manifests(name: str) -> dict[str, Any]:
    """Return the objects in a Kubernetes file, by kind."""
    text = (EXAMPLE / "kubernetes" / f"{name}.yaml").read_text()
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def pod(name: str) -> Any:
    found = manifests(name)
    job = found["Job"] if "Job" in found else found["CronJob"]["spec"]["jobTemplate"]
    return job["spec"]["template"]["spec"]


def environment(example: str) -> dict[str, str]:
    """Return the environment of an example's program, with expressions not replaced."""
    if example in ("main", "pull-request"):
        return {
            name: value
            for step in job(example)["steps"]
            for name, value in step.get("env", {}).items()
        }
    (container,) = pod(example)["containers"]
    return {each["name"]: each["value"] for each in container["env"]}


WORKFLOWS = ["main", "pull-request"]
EXAMPLES = [*WORKFLOWS, "irsa", "mounted-secrets"]


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_variable_is_a_setting_with_a_valid_value(example: str) -> None:
    known = {f"S3CACHE_{name.upper()}" for name in Settings.__dataclass_fields__}
    given = {k: v for k, v in environment(example).items() if k.startswith("S3CACHE_")}
    assert given
    assert given.keys() <= known
    values: dict[str, Any] = {}
    for name, value in given.items():
        if "KEY" not in name and "${{" not in value:
            values[name.removeprefix("S3CACHE_").lower()] = value
    Settings.load(**values)
    # The audience equals the prefix.
    prefix = policies.PULLS if example == "pull-request" else policies.MAIN
    assert given.get("S3CACHE_AUDIENCE", prefix) == prefix
    url = given["S3CACHE_URL"]
    if "${{" in url:
        assert re.findall(r"vars\.(\w+)", url) == [f"{prefix.upper()}_URL"]
    else:
        where: Any = parse_url(url)
        assert where.prefix == prefix


def test_only_examples_that_save_have_a_signing_key() -> None:
    signs = {name for name in EXAMPLES if "S3CACHE_SIGNING_KEY" in environment(name)}
    assert signs == {"main", "pull-request", "mounted-secrets"}
    assert environment("irsa")["S3CACHE_MODE"] == "read-only"
    assert "secret" not in json.dumps(manifests("irsa")).lower()


def test_an_example_trusts_the_keys_of_its_domain() -> None:
    for example, audiences in (
        ("main", ["main"]),
        ("pull-request", ["main", "pulls"]),
        ("mounted-secrets", ["main"]),
    ):
        given = environment(example)
        text = re.sub(r"\$\{\{ vars\.\w+_PUBLIC_KEY \}\}", KEY, given["S3CACHE_TRUSTED_KEYS"])
        trusted = parse_trusted(text, audience=given["S3CACHE_AUDIENCE"])
        assert [it.audience for it in trusted] == audiences


# -- GitHub


def test_main_runs_in_the_environment_that_its_role_requires() -> None:
    default = TEMPLATE["Parameters"]["GitHubEnvironment"]["Default"]
    assert job("main")["environment"] == default
    trust = TEMPLATE["Resources"]["MainRole"]["Properties"]["AssumeRolePolicyDocument"]
    (subject,) = [
        value
        for name, value in trust["Statement"][0]["Condition"]["StringEquals"].items()
        if name.endswith(":sub")
    ]
    assert subject.endswith(":environment:${GitHubEnvironment}")
    assert workflow("main")["on"] == {"push": {"branches": ["main"]}}


def test_a_pull_request_has_no_secrets_of_main() -> None:
    text = (EXAMPLE / "github" / "pull-request.yml").read_text()
    assert workflow("pull-request")["on"] == "pull_request"
    assert "environment" not in job("pull-request")
    assert set(re.findall(r"secrets\.(\w+)", text)) == {"PULLS_SIGNING_KEY"}
    assert set(re.findall(r"vars\.(MAIN\w+)", text)) == {"MAIN_PUBLIC_KEY"}


def test_a_pull_request_of_a_fork_requests_no_credentials_and_has_no_remote() -> None:
    """GitHub gives a fork no credentials, and its job must not fail because of that."""
    steps = job("pull-request")["steps"]
    (credentials,) = [step for step in steps if "configure-aws" in step.get("uses", "")]
    assert credentials["if"] == "env.IS_OURS == 'true'"
    url = environment("pull-request")["S3CACHE_URL"]
    assert url == "${{ env.IS_OURS == 'true' && vars.PULLS_URL || '' }}"
    is_ours = job("pull-request")["env"]["IS_OURS"]
    assert "head.repo.full_name == github.repository" in is_ours


def test_a_job_gets_a_token_and_only_the_program_gets_the_signing_key() -> None:
    for name in WORKFLOWS:
        assert workflow(name)["permissions"] == {}
        assert job(name)["permissions"] == {"contents": "read", "id-token": "write"}
        with_secrets = [step for step in job(name)["steps"] if "secrets." in json.dumps(step)]
        assert [step["run"] for step in with_secrets] == ["python -m s3cache run train.py"]


def test_training_reads_its_trust_settings_from_a_read_only_file() -> None:
    data = json.loads(manifests("irsa")["ConfigMap"]["data"]["trust.json"])
    assert data.keys() == {"trust", "trusted_keys", "revoked"}
    assert data["trust"] == "require"
    (trusted,) = parse_trusted(" ".join(data["trusted_keys"]), audience="other")
    assert trusted.audience == "main"
    (volume,), (container,) = pod("irsa")["volumes"], pod("irsa")["containers"]
    assert volume["configMap"]["name"] == manifests("irsa")["ConfigMap"]["metadata"]["name"]
    (mount,) = container["volumeMounts"]
    assert (mount["name"], mount["mountPath"]) == (volume["name"], "/etc/s3cache")
    assert mount["readOnly"] is True
