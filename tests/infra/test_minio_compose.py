"""The MinIO compose file agrees with its policies, with its example settings and with s3cache."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra import policies

MINIO = Path(__file__).parents[2] / "infra" / "minio"


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return yaml.safe_load((MINIO / "compose.yaml").read_text())["services"]


def policy(name: str) -> dict[str, Any]:
    return json.loads((MINIO / f"{name}.json").read_text())


def location(services: dict[str, Any], variable: str = "S3CACHE_URL") -> Any:
    from s3cache.store import parse_url

    return parse_url(services["init"]["environment"][variable])


@pytest.mark.parametrize(
    ("variable", "prefix"), [("S3CACHE_URL", "main"), ("S3CACHE_PULLS_URL", "pulls")]
)
def test_the_urls_for_users_are_ones_that_s3cache_can_open(
    services: dict[str, Any], variable: str, prefix: str
) -> None:
    from s3cache.store import open_store

    store = open_store(services["init"]["environment"][variable])
    assert store.url == f"s3://compile-cache/{prefix}?endpoint_url=http://127.0.0.1:9000"


def test_bucket_and_prefixes_are_those_of_the_policies(services: dict[str, Any]) -> None:
    main, pulls = location(services), location(services, "S3CACHE_PULLS_URL")
    assert services["init"]["environment"]["S3CACHE_BUCKET"] == main.bucket == pulls.bucket
    assert (main.prefix, pulls.prefix) == (policies.MAIN, policies.PULLS)
    for role in policies.ROLES:
        assert policy(role.file)["Statement"][-1]["Resource"] == [f"arn:aws:s3:::{main.bucket}"]


def test_ports_are_bound_to_loopback_only(services: dict[str, Any]) -> None:
    for service in services.values():
        assert service.get("network_mode") != "host"
        for port in service.get("ports", []):
            assert re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port)


def test_no_secret_has_a_default(services: dict[str, Any]) -> None:
    for service in services.values():
        for name, value in service["environment"].items():
            if re.search(r"USER|PASSWORD|SECRET|_KEY$", name):
                assert value.startswith(f"${{{name}:?")
