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


def test_what_is_overwritten_is_kept_as_a_version() -> None:
    """No policy there forbids to overwrite."""
    assert 'mc version enable "local/$S3CACHE_BUCKET"' in (MINIO / "init.sh").read_text()


def test_the_url_points_at_a_published_port(services: dict[str, Any]) -> None:
    published = [port.rpartition(":")[0] for port in services["minio"]["ports"]]
    assert location(services).endpoint_url in [f"http://{address}" for address in published]


def test_ports_are_bound_to_loopback_only(services: dict[str, Any]) -> None:
    for service in services.values():
        assert service.get("network_mode") != "host"
        for port in service.get("ports", []):
            assert re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port)


def test_images_are_pinned_to_a_release(services: dict[str, Any]) -> None:
    for service in services.values():
        assert re.fullmatch(r"minio/(minio|mc):RELEASE\.[\dTZ-]+", service["image"])


def test_init_waits_for_a_server_that_says_it_is_healthy(services: dict[str, Any]) -> None:
    assert services["minio"]["healthcheck"]["test"][0] == "CMD"
    assert services["init"]["depends_on"]["minio"] == {"condition": "service_healthy"}


def test_incomplete_uploads_are_dropped_after_a_day(services: dict[str, Any]) -> None:
    """By the server's own setting: MinIO ignores the lifecycle action for it."""
    assert services["minio"]["environment"]["MINIO_API_STALE_UPLOADS_EXPIRY"] == "24h"
    assert "AbortIncompleteMultipartUpload" not in (MINIO / "lifecycle.json").read_text()


def test_every_setting_asked_for_is_in_the_example_and_none_is_unused() -> None:
    asked = set(re.findall(r"\$\{(\w+)", (MINIO / "compose.yaml").read_text()))
    lines = (MINIO / ".env.example").read_text().splitlines()
    assert {line.partition("=")[0] for line in lines if not line.startswith("#")} == asked


def test_no_secret_has_a_default(services: dict[str, Any]) -> None:
    for service in services.values():
        for name, value in service["environment"].items():
            if re.search(r"USER|PASSWORD|SECRET|_KEY$", name):
                assert value.startswith(f"${{{name}:?")


def test_what_init_reads_is_mounted_read_only(services: dict[str, Any]) -> None:
    mounted = {}
    for volume in services["init"]["volumes"]:
        source, target, mode = volume.split(":")
        assert mode == "ro"
        assert (MINIO / source).is_file()
        mounted[target] = source
    assert "/init/init.sh" in mounted
    script = (MINIO / "init.sh").read_text()
    assert "/init/lifecycle.json" in script
    for name in re.findall(r"^add_user (\S+)", script, re.MULTILINE):
        assert f"/init/{name}.json" in mounted


def test_init_gives_each_user_the_policy_of_its_role() -> None:
    calls = re.findall(
        r"^add_user (\S+) \"\$(\w+)\"", (MINIO / "init.sh").read_text(), re.MULTILINE
    )
    assert calls == [
        ("s3cache-policy", "S3CACHE_WRITER_KEY"),
        ("s3cache-pulls-policy", "S3CACHE_PULLS_KEY"),
        ("s3cache-reader-policy", "S3CACHE_READER_KEY"),
        ("s3cache-operator-policy", "S3CACHE_OPERATOR_KEY"),
    ]
    assert [name for name, _ in calls] == [role.file for role in policies.ROLES]
