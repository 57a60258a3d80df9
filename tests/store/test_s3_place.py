"""The server of a bucket, and whether requests to it may use plain HTTP."""

from __future__ import annotations

from pathlib import Path

import pytest

from s3cache.errors import ConfigError
from s3cache.store import S3Options

CONFIG = """
[default]
region = eu-west-1

[profile minio]
endpoint_url = https://minio.example

[profile services]
services = ours

[services ours]
ec2 =
  endpoint_url = https://ec2.example
s3 =
  endpoint_url = https://s3.example
  addressing_style = path
"""


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_proxy: None) -> Path:
    path = tmp_path / "config"
    path.write_text(CONFIG)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(path))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    return path


@pytest.mark.parametrize(
    ("profile", "query"),
    [
        (None, ""),
        ("default", ""),
        ("minio", "?endpoint_url=https://minio.example"),
        ("services", "?endpoint_url=https://s3.example"),
        ("nobody", ""),
    ],
)
def test_a_profile_names_the_server_of_a_bucket(
    profile: str | None, query: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert S3Options("bucket", profile=profile).identity == f"s3://bucket{query}"
    if profile:
        monkeypatch.setenv("AWS_PROFILE", profile)
        assert S3Options("bucket").identity == f"s3://bucket{query}"


def test_variables_win_over_the_profile_and_can_be_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://all.example")
    assert S3Options("bucket", profile="minio").endpoint == "https://all.example"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://s3.example")
    assert S3Options("bucket").endpoint == "https://s3.example"
    assert S3Options("bucket", endpoint_url="https://own").endpoint == "https://own"
    monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
    assert S3Options("bucket", profile="minio").endpoint is None


def test_an_unreadable_config_file_is_ignored(config: Path) -> None:
    config.write_bytes(b"\xff[broken")
    assert S3Options("bucket", profile="minio").identity == "s3://bucket"


@pytest.mark.parametrize("host", ["127.0.0.1:9000", "localhost:9000", "[::1]:9000", "a.localhost"])
def test_plain_http_to_this_machine_is_allowed(host: str) -> None:
    assert S3Options("bucket", endpoint_url=f"http://{host}").url


@pytest.mark.parametrize("host", ["minio:9000", "10.0.0.1", "[fe80::1]:9000", "localhost.example"])
def test_plain_http_to_other_machines_needs_allow_http(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = f"http://{host}"
    with pytest.raises(ConfigError, match="allow_http=true"):
        S3Options("bucket", endpoint_url=endpoint)
    assert "allow_http=true" in S3Options("bucket", endpoint_url=endpoint, allow_http=True).url
    assert S3Options("bucket", endpoint_url=endpoint, anonymous=True)
    with pytest.raises(ConfigError, match="allow_http=true"):
        S3Options("bucket", endpoint_url=endpoint, anonymous=True, sse="C", sse_c_key=bytes(32))
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(ConfigError, match="plain http"):
        S3Options("bucket")


def test_plain_http_by_a_proxy_elsewhere_needs_allow_http(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The proxy sees all signed requests, and takes localhost for itself."""
    endpoint = "http://localhost:9000"
    monkeypatch.setenv("HTTP_PROXY", "user:secret@proxy.example:3128")
    with pytest.raises(ConfigError, match="NO_PROXY"):
        S3Options("bucket", endpoint_url=endpoint)
    assert "allow_http=true" in S3Options("bucket", endpoint_url=endpoint, allow_http=True).url
    assert S3Options("bucket", endpoint_url=endpoint, anonymous=True)
    assert S3Options("bucket", endpoint_url="https://localhost:9000")
    monkeypatch.setenv("NO_PROXY", "localhost")
    with pytest.raises(ConfigError, match="NO_PROXY"):
        S3Options("bucket", endpoint_url=endpoint, proxy="http://proxy.example:3128")


@pytest.mark.parametrize("proxy", ["http://127.0.0.1:3128", "localhost:3128", "http://[::1]:1"])
def test_plain_http_by_a_proxy_on_this_machine_is_allowed(
    proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", proxy)
    assert S3Options("bucket", endpoint_url="http://localhost:9000")


@pytest.mark.parametrize("no_proxy", ["", "*", "localhost", "localhost:9000", ".localhost"])
@pytest.mark.parametrize("host", ["localhost:9000", "127.0.0.1:9000", "minio.localhost", "[::1]:1"])
def test_botocore_finds_the_same_proxy(
    host: str, no_proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from botocore.utils import get_environ_proxies

    monkeypatch.setenv("HTTP_PROXY", "http://proxy.example:3128")
    monkeypatch.setenv("NO_PROXY", no_proxy)
    if get_environ_proxies(f"http://{host}"):
        with pytest.raises(ConfigError, match="NO_PROXY"):
            S3Options("bucket", endpoint_url=f"http://{host}")
    else:
        assert S3Options("bucket", endpoint_url=f"http://{host}")


def test_the_bundle_of_certificates_must_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tmp_path / "ca.pem"
    with pytest.raises(ConfigError, match=r"option ca_bundle.*does not exist; give the path"):
        S3Options("bucket", ca_bundle=str(bundle))
    monkeypatch.setenv("AWS_CA_BUNDLE", str(bundle))
    with pytest.raises(ConfigError, match=r"AWS_CA_BUNDLE.*does not exist"):
        S3Options("bucket")
    assert S3Options("bucket", endpoint_url="http://localhost:9000")  # no certificates are used
    bundle.touch()
    assert S3Options("bucket", ca_bundle=str(bundle))
