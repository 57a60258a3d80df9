"""The MinIO compose file agrees with its policies, with its example settings and with s3cache."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra import policies
from s3cache.store import parse_url

MINIO = Path(__file__).parents[2] / "infra" / "minio"


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return yaml.safe_load((MINIO / "compose.yaml").read_text())["services"]


def test_the_urls_for_users_lead_to_the_prefixes_of_the_policies(services: dict[str, Any]) -> None:
    variables = services["init"]["environment"]
    for variable, prefix in (
        ("S3CACHE_URL", policies.MAIN),
        ("S3CACHE_PULLS_URL", policies.PULLS),
    ):
        where: Any = parse_url(variables[variable])
        assert (where.bucket, where.prefix) == (variables["S3CACHE_BUCKET"], prefix)
        assert where.endpoint_url == "http://127.0.0.1:9000"
    for role in policies.ROLES:
        policy = json.loads((MINIO / f"{role.file}.json").read_text())
        assert policy["Statement"][-1]["Resource"] == [
            f"arn:aws:s3:::{variables['S3CACHE_BUCKET']}"
        ]


def test_ports_are_bound_to_loopback_and_no_secret_has_a_default(
    services: dict[str, Any],
) -> None:
    for service in services.values():
        assert service.get("network_mode") != "host"
        for port in service.get("ports", []):
            assert re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port)
        for name, value in service["environment"].items():
            if re.search(r"USER|PASSWORD|SECRET|_KEY$", name):
                assert value.startswith(f"${{{name}:?")
